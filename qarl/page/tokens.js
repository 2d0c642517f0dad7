// The browser of completions: a list that is filtered and sorted, and a group's tokens coloured by a column.

function bytes(text) {
  const binary = atob(text);
  const found = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) found[i] = binary.charCodeAt(i);
  return found;
}

// float16 → number, by the bits.
const HALVES = (() => {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
    table[bits] = power === 31 ? (rest ? NaN : sign * Infinity) : sign * (power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -24 * rest);
  }
  return table;
})();
const halves = (text) => Float32Array.from(new Uint16Array(bytes(text).buffer), (bits) => HALVES[bits]);

const packed = DATA.tokens;
const tokens = {
  word: new (packed.wide ? Uint32Array : Uint16Array)(bytes(packed.words).buffer),
  sampler: halves(packed.sampler_logprob),
  mismatch: halves(packed.mismatch),
  ratio: halves(packed.log_ratio),
  flags: bytes(packed.flags),
};
const made = packed.completions;
const COUNT = made.step.length;
const starts = new Uint32Array(COUNT + 1);
for (let i = 0; i < COUNT; i++) starts[i + 1] = starts[i] + made.length[i];
// Of a learner that is not aligned its own log-prob is the unquantized policy's; of others some completions have one.
const unquantized = halves(packed.unquantized_logprob);
for (let completion = 0; completion < COUNT; completion++) {
  if (DATA.runs[made.run[completion]].aligned) continue;
  for (let i = starts[completion]; i < starts[completion + 1]; i++) if (Number.isNaN(unquantized[i])) unquantized[i] = tokens.sampler[i] + tokens.mismatch[i];
}
const rounding = (i) => tokens.sampler[i] - unquantized[i];
const worstOf = Float32Array.from(made.worst, (place, i) => (place < 0 ? NaN : Math.abs(tokens.mismatch[starts[i] + place])));
// Of a conversation: what was said to the policy was not sampled, and has no log-prob.
const saidAt = (i) => Number.isNaN(tokens.sampler[i]);
const REPEATED = 32, IMPROBABLE = 16, UNKNOWN = 15;
const reasonAt = (i) => ((tokens.flags[i] & 15) === UNKNOWN ? null : packed.reasons[tokens.flags[i] & 15]);
function firstError(completion) {
  for (let i = starts[completion]; i < starts[completion + 1]; i++) if (tokens.flags[i] & (REPEATED | IMPROBABLE)) return String(i - starts[completion] + 1);
  return "none";
}
const unasked = ({ aligned, diagnostics }) => (!aligned ? "not known" : diagnostics ? `not asked here: every ${diagnostics} steps, of some` : "not asked (learner.diagnostics_every 0)");
const versionsOf = (completion) => (made.last_version[completion] === made.version[completion] ? `version ${made.version[completion]}` : `versions ${made.version[completion]} to ${made.last_version[completion]}`);
const ageOf = (completion) => (made.age[completion] === null ? "no update" : made.age[completion] === 1 ? "1 update" : `${made.age[completion]} updates`);
const texts = new Map();
function textOf(completion) {
  if (!texts.has(completion)) {
    const words = [];
    for (let i = starts[completion]; i < starts[completion + 1]; i++) words.push(packed.texts[tokens.word[i]]);
    texts.set(completion, words.join(""));
  }
  return texts.get(completion);
}

// Largest |value| but for one token in two hundred, so that a single outlier does not pale all others.
function reach(values) {
  const sizes = Float32Array.from(values, Math.abs).filter(Number.isFinite).sort();
  return Math.max(sizes.length ? sizes[Math.floor(0.995 * (sizes.length - 1))] : 0, 1e-6);
}

const diverging = (values, most) => (i) => {
  const value = values(i);
  if (!Number.isFinite(value)) return ["r-unknown"];
  const size = 0.66 * Math.sqrt(Math.min(1, Math.abs(value) / most));
  return size < 0.02 ? [] : [value < 0 ? "neg" : "pos", size];
};
let shownCompletion = 0;
const advantageAt = () => made.advantage[shownCompletion] ?? NaN;
const MOST = {
  mismatch: reach(tokens.mismatch), ratio: reach(tokens.ratio), rounding: reach(unquantized.map((_, i) => rounding(i))),
  advantage: Math.max(1e-6, ...made.advantage.filter((value) => value !== null).map(Math.abs)),
};
const COLUMNS = {
  mismatch: { title: "Mismatch", paint: diverging((i) => tokens.mismatch[i], MOST.mismatch), ramp: MOST.mismatch, ends: ["sampler higher", "learner higher"] },
  ratio: { title: "Ratio", paint: diverging((i) => tokens.ratio[i], MOST.ratio), ramp: MOST.ratio, ends: ["log ratio: made less probable", "more probable"] },
  clip: {
    title: "Clip reason",
    paint: (i) => {
      const reason = reasonAt(i);
      if (reason === null) return ["r-unknown"];
      if (reason === "none") return [];
      const kinds = ["above", "below", "sequence", "corrected"].filter((kind) => reason.includes(kind));
      return [kinds.map((kind) => `r-${kind}`).join(" ")];
    },
    chips: [["r-above", "above 1"], ["r-below", "below 1"], ["r-above r-sequence", "dotted: the whole sequence"], ["r-corrected", "weight capped or masked"]],
  },
  rounding: { title: "Quantization", paint: diverging(rounding, MOST.rounding), ramp: MOST.rounding, ends: ["unquantized policy higher", "quantized sampler higher"] },
  advantage: { title: "Advantage", paint: diverging(advantageAt, MOST.advantage), ramp: MOST.advantage, ends: ["worse than its group", "better"] },
  error: {
    title: "Error tokens",
    paint: (i) => [["", "e-improbable", "e-repeated", "e-both"][(tokens.flags[i] >> 4) & 3]],
    chips: [["e-improbable", "improbable, below 0.001"], ["e-repeated", "in a loop"], ["e-both", "both"]],
  },
  probability: {
    title: "Probability",
    paint: (i) => { const size = 0.66 * Math.min(1, -tokens.sampler[i] / 7); return size < 0.02 ? [] : ["pos", size]; },
    ends: ["sure", "stronger: the sampler gave it less, down to 0.001"],
  },
};

// What all prompts begin with says nothing about one of them.
const opening = (() => {
  const prompts = packed.prompts;
  if (prompts.length < 2) return 0;
  let end = 0;
  while (end < prompts[0].length && prompts.every((prompt) => prompt[end] === prompts[0][end])) end++;
  const cut = prompts[0].lastIndexOf(" ", end) + 1;
  return cut > 8 ? cut : 0;
})();
const promptOf = (i) => (opening ? "… " : "") + packed.prompts[made.prompt[i]].slice(opening).replace(/\s+/g, " ");

// The pictures of a completion's prompt, small PNG files.
function picturesOf(completion) {
  const numbers = made.pictures[completion];
  const shown = (index, place) => el("img", { src: `data:image/png;base64,${packed.pictures[index]}`, alt: `picture ${place + 1} of ${numbers.length} of the prompt` });
  return numbers.length ? el("div", { class: "pictures" }, ...numbers.map(shown)) : null;
}

class Browser {
  constructor(host) {
    this.host = host;
    this.column = "mismatch";
    this.sort = { by: "worst", down: true };
    this.found = [];
    this.chosen = -1;
    this.token = -1;
    this.build();
    this.filter();
  }

  build() {
    const field = (label, half, ...inputs) => el("label", { class: half ? "half" : null }, label, inputs.length > 1 ? el("span", { class: "pair" }, ...inputs) : inputs[0]);
    const again = () => this.filter();
    const range = (name) => ["from", "to"].map((side) => (this[name + side] = el("input", { type: "number", placeholder: side, step: "any", "aria-label": `${name} ${side}`, oninput: again })));
    this.search = el("input", { type: "search", placeholder: "words in prompt or completion", oninput: again });
    this.run = el("select", { onchange: again }, el("option", { value: "" }, "all"), ...DATA.runs.map((run, i) => el("option", { value: i }, run.name)));
    this.with = el("select", { onchange: again }, ...[["", "any"], ["clip", "clipped tokens"], ["corrected", "corrected tokens"], ["error", "error tokens"], ["cut", "cut off at the limit"], ["unquantized", "unquantized probabilities"]].map(([value, text]) => el("option", { value }, text)));
    const orders = [["worst", "worst token"], ["step", "step"], ["reward", "reward"], ["length", "length"], ["prompt", "prompt"], ["advantage", "advantage"]];
    this.by = el("select", { onchange: () => { this.sort = { by: this.by.value, down: !["step", "prompt"].includes(this.by.value) }; this.filter(); } }, ...orders.map(([value, text]) => el("option", { value }, text)));
    this.turn = el("button", { type: "button", title: "Turn the order round", "aria-label": "Turn the order round", onclick: () => { this.sort.down = !this.sort.down; this.filter(); } }, "↓");
    const filters = el("div", { class: "filters" },
      field("Search (/)", false, this.search), DATA.runs.length > 1 ? field("Run", true, this.run) : null,
      field("Step", true, ...range("step")), field("Reward", true, ...range("reward")), field("With", true, this.with), field("Sort by", true, this.by, this.turn));
    this.counted = el("p", { class: "count", role: "status" });
    this.spacer = el("div", { role: "presentation" });
    this.rows = el("div", { class: "rows", role: "listbox", tabindex: 0, "aria-label": "Completions", onscroll: () => this.paintRows(), onkeydown: (event) => this.listKey(event) }, this.spacer);
    const head = el("div", { class: "row-head", "aria-hidden": true }, ...["step", "reward", "worst Δ", "tokens", "prompt"].map((name) => el("span", {}, name)));
    this.detail = el("div", { class: "detail" });
    this.host.append(filters, el("div", {}, this.counted, el("div", { class: "list" }, head, this.rows)), this.detail);
    this.detail.addEventListener("pointerover", (event) => this.hover(event));
    this.detail.addEventListener("pointerdown", (event) => this.hover(event));
    this.detail.addEventListener("pointerleave", () => this.unhover());
  }

  filter() {
    const word = this.search.value.trim().toLowerCase();
    const bound = (input, otherwise) => (input.value === "" ? otherwise : Number(input.value));
    const [stepLow, stepHigh] = [bound(this.stepfrom, -Infinity), bound(this.stepto, Infinity)];
    const [rewardLow, rewardHigh] = [bound(this.rewardfrom, -Infinity), bound(this.rewardto, Infinity)];
    const run = this.run.value === "" ? null : Number(this.run.value);
    const kept = [];
    for (let i = 0; i < COUNT; i++) {
      if (run !== null && made.run[i] !== run) continue;
      if (hidden.has(DATA.runs[made.run[i]].of)) continue;
      if (made.step[i] < stepLow || made.step[i] > stepHigh || made.reward[i] < rewardLow || made.reward[i] > rewardHigh) continue;
      if (this.with.value && !this.has(i, this.with.value)) continue;
      if (word && !packed.prompts[made.prompt[i]].toLowerCase().includes(word) && !textOf(i).toLowerCase().includes(word)) continue;
      kept.push(i);
    }
    const { by, down } = this.sort;
    const key = by === "worst" ? (i) => (Number.isNaN(worstOf[i]) ? -1 : worstOf[i]) : by === "prompt" ? (i) => packed.prompts[made.prompt[i]] : (i) => made[by][i] ?? -Infinity;
    const keys = new Map(kept.map((i) => [i, key(i)]));
    kept.sort((a, b) => { const [x, y] = [keys.get(a), keys.get(b)]; return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1) || a - b; });
    this.turn.textContent = down ? "↓" : "↑";
    this.found = kept;
    const more = packed.recorded > packed.shown ? `, of ${number(packed.recorded)} recorded` : "";
    this.counted.textContent = `${number(kept.length)} of ${number(COUNT)} completions${more}`;
    this.spacer.style.height = `${kept.length * 32}px`;
    this.rows.scrollTop = 0;
    this.paintRows();
    this.choose(kept.length ? 0 : -1, false);
  }

  has(completion, kind) {
    if (kind === "cut") return made.truncated[completion] === 1;
    if (kind === "unquantized") return !Number.isNaN(unquantized[starts[completion]]);
    for (let i = starts[completion]; i < starts[completion + 1]; i++) {
      const reason = reasonAt(i);
      if (kind === "error" ? tokens.flags[i] & (IMPROBABLE | REPEATED) : reason && reason !== "none" && (reason === "corrected") === (kind === "corrected")) return true;
    }
    return false;
  }

  // Only the rows in sight are elements.
  paintRows() {
    const first = Math.max(0, Math.floor(this.rows.scrollTop / 32) - 6);
    const last = Math.min(this.found.length, first + Math.ceil((this.rows.clientHeight || 600) / 32) + 12);
    const rows = [];
    for (let place = first; place < last; place++) {
      const i = this.found[place];
      rows.push(el("div", {
        class: "row", role: "option", id: `row-${place}`, "aria-selected": String(place === this.chosen), "aria-setsize": this.found.length, "aria-posinset": place + 1,
        style: `top:${place * 32}px`, onclick: () => { this.choose(place, false); this.rows.focus({ preventScroll: true }); },
      }, ...[made.step[i], number(made.reward[i]), number(worstOf[i]), made.length[i]].map((text) => el("span", {}, String(text))),
      el("span", {}, DATA.runs.length > 1 ? swatch(DATA.runs[made.run[i]].of) : null, promptOf(i))));
    }
    this.spacer.replaceChildren(...rows);
  }

  choose(place, scroll = true) {
    this.chosen = place;
    this.token = -1;
    hideTip();
    if (scroll && place >= 0) {
      const top = place * 32, height = this.rows.clientHeight;
      if (top < this.rows.scrollTop) this.rows.scrollTop = top;
      if (top + 32 > this.rows.scrollTop + height) this.rows.scrollTop = top + 32 - height;
    }
    this.paintRows();
    this.rows.setAttribute("aria-activedescendant", place >= 0 ? `row-${place}` : "");
    this.showDetail();
  }

  move(by) { if (this.found.length) this.choose(Math.min(this.found.length - 1, Math.max(0, this.chosen + by))); }

  listKey(event) {
    const page = Math.floor(this.rows.clientHeight / 32);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.move(by);
  }

  showDetail() {
    if (this.chosen < 0) {
      const why = COUNT ? "No completion is like that; loosen the filters." : "No run here has recorded tokens: they are kept by runs of this version of qarl, unless it was started with --record 0.";
      this.detail.replaceChildren(el("p", { class: "empty" }, why));
      return;
    }
    const i = this.found[this.chosen];
    const same = [];
    for (let j = 0; j < COUNT; j++) if (made.run[j] === made.run[i] && made.step[j] === made.step[i] && made.group[j] === made.group[i]) same.push(j);
    const others = same.filter((j) => j !== i);
    const step = (text, by, key) => el("button", { type: "button", title: `${text} (${key})`, onclick: () => this.move(by) }, text);
    const where = `${DATA.runs.length > 1 ? `${DATA.runs[made.run[i]].name}, ` : ""}step ${made.step[i]}, group ${made.group[i]}`;
    const segments = el("div", { class: "segments", role: "radiogroup", "aria-label": "Colour tokens by" }, ...Object.entries(COLUMNS).map(([name, column]) =>
      el("button", { type: "button", role: "radio", "aria-checked": String(name === this.column), onclick: () => this.colour(name) }, column.title)));
    const kept = others.length ? `; ${others.length} more of its group below` : "";
    this.detail.replaceChildren(
      el("div", { class: "bar" }, segments, el("span", { class: "pair" }, step("‹ previous", -1, "k"), " ", step("next ›", 1, "j"))), this.key(),
      el("div", { class: "prompt" }, el("div", { class: "small" }, `Prompt · ${where}${kept}`), picturesOf(i), el("pre", { tabindex: 0 }, packed.prompts[made.prompt[i]])),
      this.card(i, true), ...others.map((j) => this.card(j, false)));
  }

  key() {
    const column = COLUMNS[this.column];
    const parts = [];
    if (column.ramp) {
      const stops = [-1, -0.5, -0.1, 0, 0.1, 0.5, 1].map((at) => `rgb(var(--${at < 0 ? "neg" : "pos"}) / ${0.66 * Math.sqrt(Math.abs(at))}) ${50 + 50 * at}%`);
      parts.push(`${column.ends[0]} −${number(column.ramp)}`, el("span", { class: "ramp", style: `background:linear-gradient(to right, ${stops.join(", ")})` }), `+${number(column.ramp)} ${column.ends[1]}`);
    } else if (column.ends) {
      parts.push(column.ends[0], el("span", { class: "ramp", style: "background:linear-gradient(to right, rgb(var(--pos) / 0), rgb(var(--pos) / .66))" }), column.ends[1]);
    } else for (const [style, text] of column.chips) parts.push(el("span", { class: `chip ${style}` }, text));
    return el("div", { class: "key" }, ...parts);
  }

  card(completion, chosen) {
    const facts = [["reward", number(made.reward[completion])], [`mean of ${made.group_size[completion]}`, number(made.group_reward[completion])], ["advantage", number(made.advantage[completion])],
      ["tokens", `${made.length[completion]}${made.truncated[completion] ? ", cut off" : ""}`], ["worst |Δ log p|", number(worstOf[completion])], ["first error token", firstError(completion)], ["weights", versionsOf(completion)], ["age", ageOf(completion)]];
    const stream = el("div", { class: "stream", "data-completion": completion });
    shownCompletion = completion;
    const { paint } = COLUMNS[this.column];
    let block = stream;
    for (let i = starts[completion]; i < starts[completion + 1]; i++) {
      const said = saidAt(i);
      if (said && block === stream) stream.append(block = el("div", { class: "said" }));
      else if (!said) block = stream;
      block.append(this.span(completion, i, said ? [] : paint(i)));
    }
    return el("div", { class: `card${chosen ? " chosen" : ""}` }, el("div", { class: "facts" }, ...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value)))), stream);
  }

  span(completion, i, [style, alpha]) {
    const text = packed.texts[tokens.word[i]];
    const special = /^<\|?[^\s<>]*\|?>$/.test(text) && text.length > 2;
    const worst = i - starts[completion] === made.worst[completion];
    const shown = text === "" ? "▯" : text.replace(/\n/g, "↵\n");
    const node = el("span", { class: [style, special || text === "" ? "special" : "", worst ? "worst" : ""].filter(Boolean).join(" ") || null, "data-i": i }, shown);
    if (alpha) node.style.setProperty("--a", alpha.toFixed(2));
    return node;
  }

  colour(name) {
    this.column = name;
    this.showDetail();
    this.detail.querySelector('[aria-checked="true"]').focus({ preventScroll: true });
  }

  cycle() {
    const names = Object.keys(COLUMNS);
    this.colour(names[(names.indexOf(this.column) + 1) % names.length]);
  }

  hover(event) {
    const node = event.target.closest("[data-i]");
    if (!node) return this.unhover();
    this.tell(node, event.clientX, event.clientY);
  }

  unhover() { hideTip(); this.detail.querySelector(".at")?.classList.remove("at"); }

  moveToken(by) {
    if (this.chosen < 0) return;
    const length = made.length[this.found[this.chosen]];
    this.token = Math.min(length - 1, Math.max(0, this.token + by));
    const node = this.detail.querySelector(`.chosen [data-i="${starts[this.found[this.chosen]] + this.token}"]`);
    this.unhover();
    if (!node) return;
    node.classList.add("at");
    node.scrollIntoView({ block: "nearest" });
    const box = node.getBoundingClientRect();
    this.tell(node, box.left, box.bottom - 12);
  }

  tell(node, x, y) {
    const i = Number(node.dataset.i), completion = Number(node.closest("[data-completion]").dataset.completion);
    const sampler = tokens.sampler[i], apart = tokens.mismatch[i], ratio = tokens.ratio[i];
    const probability = (logprob) => (Number.isNaN(logprob) ? "not known" : `${number(Math.exp(logprob))}  (log ${number(logprob)})`);
    const errors = [tokens.flags[i] & IMPROBABLE ? "improbable" : "", tokens.flags[i] & REPEATED ? "in a loop" : ""].filter(Boolean).join(", ");
    const place = ["token", `${packed.ids[tokens.word[i]]}, ${i - starts[completion] + 1} of ${made.length[completion]}`];
    const text = JSON.stringify(packed.texts[tokens.word[i]]);
    if (saidAt(i)) showTip(text, [place, ["said to the policy", "nothing is learned from it"]], x, y);
    else showTip(text, [
      place,
      ["π sampler", probability(sampler)], ...(DATA.runs[made.run[completion]].aligned ? [["π learner", probability(sampler + apart)]] : []),
      ["π unquantized", Number.isNaN(unquantized[i]) ? unasked(DATA.runs[made.run[completion]]) : probability(unquantized[i])], ["Δ log p", number(apart)],
      ["ratio", Number.isNaN(ratio) ? "no update" : `${number(Math.exp(ratio))}  (log ${number(ratio)})`], ["clipped", reasonAt(i) ?? "no update"],
      ["advantage", number(made.advantage[completion])], ["error token", errors || "no"],
    ], x, y);
  }
}
