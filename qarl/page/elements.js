"use strict";
// Small tools: elements whose text is always text, numbers as a person reads them, files to download.

const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = DATA.kinds;
const COLOURS = 8;
const DASHES = ["", "6 4", "1.5 4", "10 3 2 3"];

function make(namespace, tag, attributes, children) {
  const node = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);

const colour = (kind) => `var(--c${kind % COLOURS})`;
const swatch = (kind) => el("span", { class: "swatch", style: `background:${colour(kind)}` });

// 0.01234 → 0.0123, 12345.6 → 12,346, 1.234e-5 → 1.23e-5
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace(/^-/, "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
const percent = (value) => (value === null || Number.isNaN(value) ? "–" : `${number(100 * value)} %`);
const inUnit = (unit) => (unit === "share" ? percent : number);

function download(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function table(columns, rows, figures = []) {
  const place = (index) => (figures.includes(index) ? "n" : null);
  const head = el("tr", {}, ...columns.map((column, index) => el("th", { class: place(index), scope: "col" }, column)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, index) => el("td", { class: place(index) }, cell))));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "table" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

const tip = document.getElementById("tip");
function showTip(title, pairs, x, y) {
  const list = pairs.flatMap(([name, value]) => [el("dt", {}, ...[].concat(name)), el("dd", {}, value)]);
  tip.replaceChildren(el("div", { class: "what" }, title), el("dl", {}, ...list));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width < innerWidth ? x + 16 : Math.max(6, x - 16 - box.width);
  const top = y + 18 + box.height < innerHeight ? y + 18 : Math.max(6, y - 14 - box.height);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}
const hideTip = () => { tip.hidden = true; };

const within = (section, part) => document.querySelector(`#${section} ${part}`);

const root = document.documentElement;
const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
try { theme = localStorage.getItem("qarl-theme") ?? "auto"; } catch { /* a file without storage keeps none */ }
const themeButton = el("button", { type: "button", title: "Theme (t)", onclick: () => turnTheme() });
within("top", ".tools").append(themeButton);
within("top", "nav").append(...[...document.querySelectorAll("section")].map((section) => el("a", { href: `#${section.id}` }, section.dataset.name)));
function applyTheme() {
  const dark = theme === "dark" || (theme === "auto" && prefersDark.matches);
  root.dataset.theme = dark ? "dark" : "light";
  themeButton.setAttribute("aria-label", `Theme: ${theme}`);
  themeButton.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
}
function turnTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % 3];
  try { localStorage.setItem("qarl-theme", theme); } catch { /* as above */ }
  applyTheme();
}
prefersDark.addEventListener("change", applyTheme);
applyTheme();
