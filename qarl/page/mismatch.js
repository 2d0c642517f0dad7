// Puts the page of `qarl mismatch` together.

const dark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", applyTheme);
applyTheme();

const within = (section, part) => document.querySelector(`#${section} ${part}`);
function figuresInto(section, figures) {
  for (const figure of figures) {
    const host = el("figure");
    within(section, ".figures").append(host);
    charts.push(new LineChart(figure, host));
  }
}

function toggle(kind, button) {
  if (hidden.has(kind)) hidden.delete(kind);
  else if (hidden.size < KINDS.length - 1) hidden.add(kind);
  button.setAttribute("aria-pressed", String(!hidden.has(kind)));
  drawAll();
}

document.getElementById("summary").append(table(["nats, but for shares and correlations", ...KINDS],
  DATA.measured.map(([name, ...values]) => [el("code", {}, name), ...values.map(number)]), KINDS.map((_, index) => index + 1)));
within("curves", ".head").append(el("div", { class: "legend", role: "group", "aria-label": "Learners" }, ...KINDS.map((kind, index) =>
  el("button", { type: "button", "aria-pressed": "true", title: "Show or hide", onclick: (event) => toggle(index, event.currentTarget) }, swatch(index), kind))));
figuresInto("curves", DATA.figures);
figuresInto("layers", DATA.layers);
within("layers", ".setup").append(el("div", {}, el("h3", {}, "Largest errors"),
  table(["layer", "scheme", "kernel"], DATA.worst.map(([layer, ...values]) => [el("code", {}, layer), ...values.map(percent)]), [1, 2])));
drawAll();

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
addEventListener("beforeprint", drawAll);
addEventListener("scroll", hideTip, { passive: true });
