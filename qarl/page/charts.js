// Figures as SVG: lines with bands over a linear or logarithmic scale, and bars of parts of a whole.

const charts = [];
const hidden = new Set();
let smoothing = 1; // points a drawn value is the mean of
const MARGIN = { left: 52, right: 14, top: 8, bottom: 34 };

function ticks(low, high, logarithmic, count = 5) {
  if (logarithmic) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((to - from) / 6));
    const steps = to - from <= 1 ? [1, 2, 5] : [1];
    const found = [];
    for (let power = from; power <= to; power += every) for (const step of steps) found.push(step * 10 ** power);
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }
  const raw = (high - low) / count;
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 5, 10].find((factor) => factor * base >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function range(values, logarithmic, unit) {
  const usable = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
  if (!usable.length) return null;
  let low = usable.reduce((a, b) => Math.min(a, b)), high = usable.reduce((a, b) => Math.max(a, b));
  if (logarithmic) return low === high ? [low / 3, high * 3] : [low / 1.15, high * 1.15];
  if (low === high) return low === 0 ? [0, unit === "share" ? 0.01 : 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const pad = (high - low) * 0.06;
  return [low >= 0 && low < 0.5 * high ? 0 : low - pad, high + pad];
}

function scale([low, high], from, to, logarithmic) {
  const f = logarithmic ? Math.log10 : (value) => value;
  const slope = (to - from) / (f(high) - f(low) || 1);
  const place = (value) => from + (f(Math.min(Math.max(value, logarithmic ? low : -Infinity), Infinity)) - f(low)) * slope;
  return place;
}

// A centred mean over `width` points, of what lies within the line.
function smoothed(values, width) {
  const half = Math.floor(width / 2);
  if (!half) return values;
  return values.map((_, index) => {
    const part = values.slice(Math.max(0, index - half), index + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

const path = (x, y, xs, ys) => xs.map((value, i) => `${i ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("");

class LineChart {
  constructor(figure, host, height = 214) {
    this.figure = figure;
    this.height = height;
    this.names = [...new Set(figure.lines.map((line) => line.name))];
    this.area = el("div");
    this.host = host;
    host.append(caption(figure, () => this.svg), this.legend(), this.area);
    this.at = null;
  }

  legend() {
    if (this.names.length < 2 || this.figure.points) return "";
    const items = this.names.map((name, index) => el("span", {}, svg("svg", { viewBox: "0 0 26 8", "aria-hidden": true },
      svg("path", { d: "M1 4H25", stroke: KINDS.length > 1 ? "var(--soft)" : colour(0), "stroke-width": 2, "stroke-dasharray": DASHES[index] })), name));
    return el("div", { class: "names" }, ...items);
  }

  draw(width) {
    const { figure, height } = this;
    const lines = (this.lines = figure.lines.filter((line) => figure.fixed || !hidden.has(line.of)));
    const format = inUnit(figure.unit);
    const smooth = figure.x === "step" && !["accuracy", "heldout", "codes"].includes(figure.id) ? smoothing : 1;
    const spanX = range(lines.flatMap((line) => line.x), figure.log_x);
    const values = lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]).filter(Number.isFinite);
    const zeros = figure.log && values.length > 0 && values.every((value) => value === 0); // which no logarithm shows
    const log = figure.log && !zeros;
    const spanY = range(values, log, figure.unit);
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.words() });
    this.svg = drawn;
    this.area.replaceChildren(drawn);
    if (!spanX || !spanY) return;
    if (!figure.log_x) { const xs = lines.flatMap((line) => line.x); spanX[0] = Math.min(...xs); spanX[1] = Math.max(...xs); }
    if (spanX[0] === spanX[1]) { spanX[0] -= 0.5; spanX[1] += 0.5; }
    const x = (this.x = scale(spanX, MARGIN.left, width - MARGIN.right, figure.log_x));
    const y = (this.y = scale(spanY, height - MARGIN.bottom, MARGIN.top, log));
    if (zeros) {
      drawn.append(svg("text", { class: "zeros", x: (MARGIN.left + width - MARGIN.right) / 2, y: height / 2, "text-anchor": "middle" },
        figure.x === "step" ? `0 in all ${spanX[1]} steps` : "0 everywhere"));
    }
    for (const value of zeros ? [0] : ticks(...spanY, log)) {
      drawn.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
        svg("text", { x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of ticks(...spanX, figure.log_x, Math.max(3, Math.floor(width / 90)))) {
      if (figure.x === "step" && !Number.isInteger(value)) continue;
      drawn.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: height - MARGIN.bottom, y2: height - MARGIN.bottom + 4 }),
        svg("text", { x: x(value), y: height - MARGIN.bottom + 16, "text-anchor": "middle" }, number(value)));
    }
    drawn.append(svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: height - MARGIN.bottom, y2: height - MARGIN.bottom }),
      svg("text", { x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, figure.x));
    for (const line of lines) if (line.low) {
      const back = [...line.x.keys()].reverse();
      const edge = back.map((i) => `L${x(line.x[i]).toFixed(1)} ${y(line.low[i]).toFixed(1)}`).join("");
      drawn.append(svg("path", { class: "band", fill: colour(line.of), d: `${path(x, y, line.x, line.high)}${edge}Z` }));
    }
    if (figure.points) for (const line of lines) {
      line.x.forEach((value, i) => drawn.append(svg("circle", { class: "point", cx: x(value).toFixed(1), cy: y(line.y[i]).toFixed(1), r: 1.7, fill: colour(line.of) })));
    } else for (const line of lines) {
      const look = { stroke: colour(line.of), "stroke-dasharray": DASHES[this.names.indexOf(line.name)] };
      if (smooth > 1) drawn.append(svg("path", { class: "plot faint", ...look, d: path(x, y, line.x, line.y) }));
      drawn.append(svg("path", { class: "plot", ...look, d: path(x, y, line.x, smoothed(line.y, smooth)) }));
      if (line.x.length <= 14) line.x.forEach((value, i) => drawn.append(svg("circle", { cx: x(value), cy: y(line.y[i]), r: 2.6, fill: colour(line.of) })));
    }
    this.cross = svg("g", {});
    drawn.append(this.cross);
    drawn.addEventListener("pointermove", (event) => this.point(event));
    drawn.addEventListener("pointerleave", () => this.leave());
    drawn.addEventListener("blur", () => this.leave());
    drawn.addEventListener("keydown", (event) => this.key(event));
  }

  // What a screen reader says of the figure.
  words() {
    const format = inUnit(this.figure.unit);
    const parts = this.lines.map((line) => `${KINDS[line.of]}, ${line.name}: from ${format(line.y[0])} to ${format(line.y[line.y.length - 1])}`);
    return `${this.figure.title}. ${parts.join("; ")}. Arrow keys read values.`;
  }

  places() { return [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b); }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
    const places = this.places();
    const nearest = places.reduce((a, b) => (Math.abs(this.x(b) - px) < Math.abs(this.x(a) - px) ? b : a), places[0]);
    this.show(nearest, event.clientX, event.clientY);
  }

  key(event) {
    const places = this.places();
    const now = this.at === null ? -1 : places.indexOf(this.at);
    const last = places.length - 1;
    const to = { ArrowRight: Math.min(last, now + 1), ArrowLeft: Math.max(0, now - 1), Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const box = this.svg.getBoundingClientRect();
    this.show(places[to], box.left + this.x(places[to]), box.top + 20);
  }

  show(place, clientX, clientY) {
    this.at = place;
    const format = inUnit(this.figure.unit);
    const pairs = [];
    for (const line of this.lines) {
      const i = nearestIndex(line.x, place);
      if (this.figure.x === "step" && line.x[i] !== place) continue;
      const band = line.low ? `  [${format(line.low[i])} … ${format(line.high[i])}]` : "";
      const name = [KINDS.length > 1 ? KINDS[line.of] : null, this.names.length > 1 ? line.name : null].filter(Boolean).join(", ");
      pairs.push([[swatch(line.of), name || line.name], format(line.y[i]) + band]);
    }
    showTip(this.figure.labels?.[place - 1] ?? `${this.figure.x} ${number(place)}`, pairs, clientX, clientY);
    this.mark(place, true);
    if (this.figure.x === "step") for (const chart of charts) if (chart !== this && chart.figure?.x === "step") chart.mark(place, false);
  }

  mark(place, dots) {
    if (!this.cross) return;
    const at = this.x(place);
    this.cross.replaceChildren();
    if (at < MARGIN.left - 1 || at > this.svg.viewBox.baseVal.width - MARGIN.right + 1) return;
    this.cross.append(svg("line", { class: "cross", x1: at, x2: at, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    if (dots) for (const line of this.lines) {
      const i = nearestIndex(line.x, place);
      if (this.figure.x === "step" && line.x[i] !== place) continue;
      this.cross.append(svg("circle", { cx: this.x(line.x[i]), cy: this.y(line.y[i]), r: 3.6, fill: colour(line.of) }));
    }
  }

  leave() {
    this.at = null;
    hideTip();
    for (const chart of charts) chart.cross?.replaceChildren();
  }
}

function nearestIndex(values, wanted) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

// One bar a configuration, its parts side by side to scale.
class PartsChart {
  constructor(title, help, rows, host) {
    this.rows = rows; // [{of, parts: {name: seconds}}]
    this.figure = { id: title.toLowerCase().replace(/\W+/g, "-"), title, help };
    this.names = [...new Set(rows.flatMap((row) => Object.keys(row.parts)))];
    this.area = el("div");
    const keys = this.names.map((name, index) => el("span", {}, swatch(index), name));
    host.append(caption(this.figure, () => this.svg), el("div", { class: "names" }, ...keys), this.area);
  }

  draw(width) {
    const rows = this.rows.filter((row) => !hidden.has(row.of));
    const most = Math.max(...rows.map((row) => total(row.parts)), 1e-9);
    const height = 8 + rows.length * 46;
    const words = rows.map((row) => `${KINDS[row.of]}: ${this.names.map((name) => `${name} ${number(row.parts[name] ?? 0)} s`).join(", ")}`);
    this.svg = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${this.figure.title}. ${words.join("; ")}` });
    rows.forEach((row, line) => {
      const top = 4 + line * 46;
      const sum = total(row.parts);
      this.svg.append(svg("text", { x: 2, y: top + 12 }, `${KINDS.length > 1 ? `${KINDS[row.of]}: ` : ""}${number(sum)} s a step`));
      let left = 0;
      this.names.forEach((name, index) => {
        const seconds = row.parts[name] ?? 0;
        const wide = (seconds / most) * width;
        const share = `${Math.round((100 * seconds) / sum)} %`;
        const part = svg("rect", { x: left, y: top + 18, width: Math.max(wide - 1, 0), height: 20, rx: 2, fill: colour(index) });
        part.addEventListener("pointermove", (event) => showTip(name, [["seconds a step", number(seconds)], ["share", share]], event.clientX, event.clientY));
        part.addEventListener("pointerleave", hideTip);
        this.svg.append(part);
        if (wide > 9 * (name.length + share.length) * 0.8) {
          this.svg.append(svg("text", { class: "inside", x: left + 7, y: top + 32 }, `${name} ${share}`));
        } else if (wide > 34) this.svg.append(svg("text", { class: "inside", x: left + 5, y: top + 32 }, share));
        left += wide;
      });
    });
    this.area.replaceChildren(this.svg);
  }
}
const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

function caption(figure, drawn) {
  return el("figcaption", {}, el("b", {}, figure.title),
    el("span", { class: "save" }, ...Object.entries({ SVG: saveSvg, PNG: savePng }).map(([kind, save]) =>
      el("button", { type: "button", title: `Download “${figure.title}” as ${kind}`, onclick: () => save(figure, drawn()) }, kind))),
    el("p", {}, figure.help + (figure.unit && figure.unit !== "share" ? ` (${figure.unit})` : "")));
}

// The figure as it is shown, with its styles written into it and its title above it.
function svgText(figure, drawn) {
  const copy = drawn.cloneNode(true);
  const shown = drawn.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((node, index) => {
    const style = getComputedStyle(shown[index]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight"]) {
      node.setAttribute(name, style.getPropertyValue(name));
    }
  });
  const { width, height } = drawn.viewBox.baseVal;
  const page = getComputedStyle(document.documentElement);
  copy.setAttribute("viewBox", `0 -26 ${width} ${height + 26}`);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height + 26);
  copy.prepend(svg("rect", { x: 0, y: -26, width, height: height + 26, fill: page.getPropertyValue("--card") }),
    svg("text", { x: 4, y: -8, fill: page.getPropertyValue("--ink"), style: "font: 600 13px system-ui, sans-serif" }, figure.title));
  return new XMLSerializer().serializeToString(copy);
}

const saveSvg = (figure, drawn) => download(`${figure.id}.svg`, new Blob([svgText(figure, drawn)], { type: "image/svg+xml" }));

// At twice the size it is shown in.
function savePng(figure, drawn) {
  const { width, height } = drawn.viewBox.baseVal;
  const image = new Image();
  image.onload = () => {
    const canvas = el("canvas", { width: 2 * width, height: 2 * (height + 26) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(`${figure.id}.png`, blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(figure, drawn))}`;
}

function drawAll() {
  const widths = charts.map((chart) => Math.max(260, Math.round(chart.area.clientWidth || 400))); // all before any is changed
  charts.forEach((chart, index) => chart.draw(widths[index]));
}

function figuresInto(section, figures) {
  for (const figure of figures) {
    const host = el("figure");
    within(section, ".figures").append(host);
    charts.push(new LineChart(figure, host));
  }
}

let whenHidden = () => {}, whenResized = () => {}; // what a page does besides drawing its figures again
function toggle(kind, button) {
  if (hidden.has(kind)) hidden.delete(kind);
  else if (hidden.size < KINDS.length - 1) hidden.add(kind);
  button.setAttribute("aria-pressed", String(!hidden.has(kind)));
  drawAll();
  whenHidden();
}
const legend = (name) => el("div", { class: "legend", role: "group", "aria-label": name }, ...KINDS.map((kind, number) =>
  el("button", { type: "button", "aria-pressed": "true", title: "Show or hide", onclick: (event) => toggle(number, event.currentTarget) }, swatch(number), kind)));

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); whenResized(); } });
addEventListener("beforeprint", drawAll);
addEventListener("scroll", hideTip, { passive: true });
