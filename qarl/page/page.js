// Puts the page together: summary, figures, browser, setup, theme and keys.

function summary() {
  const rows = DATA.runs.map((run) => [
    el("span", {}, swatch(run.of), run.name), KINDS[run.of], String(run.seed), `${number(run.steps)} of ${number(run.asked)}`, number(run.reward), run.heldout ?? "–",
    run.deployed ?? "–", number(run.publishes),
  ]);
  document.getElementById("summary").append(table(["run", "configuration", "seed", "steps", "last reward", "held-out", "deployed", "publishes"], rows, [2, 3, 4, 5, 6, 7]));
}

function curves() {
  figuresInto("curves", DATA.curves);
  const head = within("curves", ".head");
  if (KINDS.length > 1) head.append(legend("Configurations"));
  const longest = Math.max(...DATA.curves.flatMap((figure) => figure.lines.map((line) => line.x.length)));
  if (longest > 12) {
    smoothing = longest > 60 ? 9 : 1;
    head.append(el("label", { class: "small" }, "smooth ", el("select", { onchange: (event) => { smoothing = Number(event.target.value); drawAll(); } },
      ...[1, 5, 9, 25, 75].filter((width) => width < longest).map((width) => el("option", { value: width, selected: width === smoothing }, width > 1 ? `${width} points` : "off")))));
  }
  if (DATA.runs.length > KINDS.length) head.append(el("span", { class: "small" }, "Lines are means over seeds, bands reach from the lowest to the highest."));
}

function where() {
  if (DATA.where.length) figuresInto("where", DATA.where);
  else within("where", ".figures").append(el("p", { class: "empty" }, "No recorded token has a mismatch: all are equal, or the learner's log-probs are not on record. The curve above is over all tokens."));
  figuresInto("where", DATA.profiles);
}

function treatment() {
  if (!DATA.treatment.length) return within("treatment", ".setup").append(el("p", { class: "empty" }, "No tokens that were learned from are on record."));
  const rows = DATA.treatment.map(([of, sign, kind, count, ...shares]) => [el("span", {}, swatch(of), KINDS[of]), sign, kind, number(count), ...shares.map(percent)]);
  within("treatment", ".setup").append(el("div", {}, table(["configuration", "advantage", "token", "tokens", "clipped", "weight cut", "learned as it is"], rows, [3, 4, 5, 6])));
}

function time() {
  const add = (title, help, key) => {
    const host = el("figure");
    within("time", ".figures").append(host);
    charts.push(new PartsChart(title, help, DATA.time.map((row) => ({ of: row.of, parts: row[key] })), host));
  };
  add("Seconds a step, by phase", "Median over steps; an evaluation counts with its share of the steps.", "phases");
  if (DATA.time.some((row) => total(row.learn) > 0)) add("Within learning", "Median seconds a step.", "learn");
}

function setup() {
  const host = within("setup", ".setup");
  const part = (title, ...nodes) => host.append(el("div", {}, el("h3", {}, title), ...nodes));
  const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  if (DATA.settings.length) part(KINDS.length > 1 ? "What differs" : "Settings that are not the defaults", table(["field", ...KINDS], DATA.settings.map(([name, ...values]) => [el("code", {}, name), ...values.map(text)])));
  part("Publishes", table(["run", "publishes", "canaries", "largest mean |Δ log p|", "last digest"], DATA.runs.map((run) => [
    run.name, number(run.publishes), number(run.canaries), run.canaries ? number(run.canary) : "–", el("code", {}, run.digest ?? "–")]), [1, 2, 3]));
  const audits = new Map();
  for (const run of DATA.runs) if (run.audit) audits.set(JSON.stringify(run.audit), [...(audits.get(JSON.stringify(run.audit)) ?? []), run.name]);
  for (const [audit, names] of audits) {
    const [columns, ...rows] = JSON.parse(audit);
    part(`Audit before step 1: layers, as learner and engine have them${DATA.runs.length > 1 ? ` (${names.join(", ")})` : ""}`, table(columns, rows));
  }
  if (!audits.size) part("Audit before step 1", el("p", { class: "empty" }, "Not on record: the run is of an earlier version of qarl."));
  const facts = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.environment)))];
  part("Environment", table(["", ...DATA.runs.map((run) => run.name)], facts.map((fact) => [fact, ...DATA.runs.map((run) => text(run.environment[fact]))])));
}

const KEYS = [["j  k", "next, previous completion"], ["← →", "token by token, with all its values"], ["c", "colour by the next column"], ["/", "search"], ["t", "light, dark, as the system"],
  ["Tab", "figures, where ← → read values"], ["?", "these keys"]];
function help() {
  const dialog = el("dialog", { "aria-label": "Keys" }, el("h2", {}, "Keys"),
    el("table", {}, ...KEYS.map(([keys, text]) => el("tr", {}, el("td", {}, ...keys.split(/\s+/).map((key) => el("kbd", {}, key))), el("td", {}, text)))),
    el("form", { method: "dialog" }, el("button", {}, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

summary();
curves();
where();
treatment();
time();
setup();
const browser = new Browser(within("tokens", ".browser"));
whenHidden = () => browser.filter();
whenResized = () => browser.paintRows();
within("top", ".tools").append(el("button", { type: "button", title: "Keys (?)", "aria-label": "Keyboard keys", onclick: help }, "?"));
drawAll();

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector("dialog")) {
    if (event.key === "Escape" && event.target.blur) event.target.blur();
    return;
  }
  const act = {
    j: () => browser.move(1), k: () => browser.move(-1), c: () => browser.cycle(), t: turnTheme, "?": help, "/": () => browser.search.focus(),
    ArrowRight: () => browser.moveToken(1), ArrowLeft: () => browser.moveToken(-1), Escape: () => browser.unhover(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
