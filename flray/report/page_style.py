"""How the page looks, and the little that it does; it is complete without its script."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2430; --soft: #5b6675; --line: #dde2e9; --ground: #f6f7f9; --card: #ffffff;
  --accent: #0072b2; --paper: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa5b4; --line: #333c48; --ground: #14181e; --card: #1d232b;
    --accent: #6bb8e8; --paper: #ffffff; }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 3.5rem; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header.top, main, footer { max-width: 84rem; margin: 0 auto; padding: 0 1.5rem; }
header.top { padding-top: 2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h1, h2, h3, h4, summary, p, dd, figcaption, .settings td { overflow-wrap: anywhere; }
td, tbody th { overflow-wrap: break-word; }
h2 { font-size: 1.35rem; margin: 2.4rem 0 .8rem; padding-bottom: .3rem;
  border-bottom: 2px solid var(--line); }
h3 { font-size: 1.1rem; margin: 1.6rem 0 .6rem; }
h4 { font-size: 1rem; margin: 1.2rem 0 .5rem; }
a { color: var(--accent); }
.sub, .note, .remark, figcaption, caption { color: var(--soft); }
.sub { margin: 0 0 1rem; }
.note, figcaption, caption { font-size: .88rem; }
.warn { border-left: 4px solid #d55e00; background: var(--card); padding: .6rem 1rem;
  border-radius: 0 .4rem .4rem 0; }
nav { position: sticky; top: 0; z-index: 5; background: var(--ground);
  border-bottom: 1px solid var(--line); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; max-width: 84rem;
  margin: 0 auto; padding: .6rem 1.5rem; font-size: .92rem; max-height: 6rem; overflow-y: auto; }
nav a { text-decoration: none; }
nav a:hover, nav a:focus { text-decoration: underline; }
dl.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr));
  gap: .7rem; margin: 0; }
dl.cards > div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .9rem; min-width: 0; }
dl.cards > div:first-child { grid-column: span 2; border-color: var(--accent);
  box-shadow: inset 3px 0 var(--accent); }
dl.cards > div:first-child dd:not(.remark) { font-size: 1.7rem; line-height: 1.2; }
dl.cards dt { font-size: .8rem; color: var(--soft); }
dl.cards dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dl.cards dd.remark { font-size: .78rem; font-weight: 400; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr));
  gap: 1rem; align-items: start; margin: 1rem 0; }
.figures.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; background: var(--paper); border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem; text-align: center; min-width: 0; color: #1c2430; }
figure svg, figure img { width: 100%; height: auto; display: block; margin: 0 auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { margin-top: .4rem; text-align: left; color: #5b6675; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; background: var(--card); min-width: 22rem; }
caption { text-align: left; padding: .3rem 0; caption-side: top; background: var(--ground); }
th, td { padding: .32rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; min-width: 4rem; }
.long { display: inline-block; width: 14rem; overflow-wrap: anywhere; white-space: normal; }
.tall { max-height: 40rem; overflow-y: auto; border: 1px solid var(--line); }
.tall thead th { position: sticky; top: 0; background: var(--card); z-index: 1; }
tbody th { font-weight: 500; max-width: 34rem; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
td { max-width: 44rem; min-width: 3rem; }
tbody tr:hover { background: color-mix(in srgb, var(--accent) 8%, transparent); }
thead button { all: unset; cursor: pointer; }
thead button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
input.filter { font: inherit; padding: .3rem .6rem; border: 1px solid var(--line);
  border-radius: .4rem; background: var(--card); color: inherit; width: min(100%, 24rem); }
details { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem 1rem; margin: .7rem 0; }
details[open] { padding-bottom: 1rem; }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0; }
details caption { background: var(--card); }
details h3:first-of-type { margin-top: .8rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .4rem;
  padding: .7rem 1rem; overflow-x: auto; font-size: .85rem; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
pre.command code::before { content: "$ "; color: var(--soft); }
.chips { display: flex; flex-wrap: wrap; gap: .2rem; }
.chip { border-left: .35rem solid var(--of, #999); background: var(--ground); padding: 0 .35rem;
  border-radius: .15rem; font-size: .8rem; font-variant-numeric: tabular-nums; }
.settings { columns: 22rem; column-gap: 1rem; }
.settings table { width: 100%; break-inside: avoid; margin-bottom: 1rem; }
.settings caption { font-weight: 600; font-size: .95rem; color: var(--ink); }
.settings th { width: 60%; font-weight: 400; color: var(--soft); }
footer { padding-top: 2rem; padding-bottom: 2rem; color: var(--soft); font-size: .85rem; }
@media print {
  :root { --ground: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #ccc; }
  nav, input.filter { display: none; }
  figure, dl.cards > div, tr { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
  .scroll, pre { overflow: visible; max-height: none; }
  pre { white-space: pre-wrap; }
}
"""

SCRIPT = """
"use strict";
function key(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value;
  return value === undefined ? cell.textContent.trim() : Number(value);
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b, undefined, {numeric: true});
}
function sortBy(table, header, column) {
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = Array.from(table.tBodies[0].rows);
  rows.sort((a, b) => (down ? -1 : 1) * compare(key(a, column), key(b, column)));
  table.tBodies[0].append(...rows);
}
for (const table of document.querySelectorAll("table.sortable")) {
  Array.from(table.tHead.rows[0].cells).forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortBy(table, header, column));
    header.append(button);
  });
  if (table.tBodies[0].rows.length < 8) continue;
  const filter = document.createElement("input");
  filter.className = "filter";
  filter.type = "search";
  filter.placeholder = "filter rows: words that must all occur";
  filter.setAttribute("aria-label", "filter rows");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = Array.from(row.cells, (cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.parentElement.before(filter);
}
function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  for (let node = target; node; node = node.parentElement) {
    if (node.tagName === "DETAILS") node.open = true;
  }
}
window.addEventListener("hashchange", reveal);
reveal();
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = Array.from(document.querySelectorAll("details:not([open])"));
  for (const each of folded) each.open = true;
});
window.addEventListener("afterprint", () => {
  for (const each of folded) each.open = false;
});
"""
