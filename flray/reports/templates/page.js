"use strict";
for (const section of document.querySelectorAll("main > section")) {
  const link = document.createElement("a");
  link.href = `#${section.id}`;
  link.textContent = section.querySelector("h2").textContent;
  const item = document.createElement("li");
  item.append(link);
  document.querySelector("nav ul").append(item);
}
for (const table of document.querySelectorAll("thead")) {
  const first = table.parentElement.tBodies[0].rows[0];
  Array.from(table.rows[0].cells).forEach((header, column) => {
    header.classList.toggle("number", first?.cells[column].className === "number");
  });
}
function key(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = Number.parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(number) ? text : number;
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
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
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
