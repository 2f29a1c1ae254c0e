// What JavaScript adds to the panels of the live page. Without it, charts are tables and a column's
// header is a link. `enhance` is called for a panel's body at load and after each swap: charts keep
// their canvas and zoom, tables their order, what was unfolded stays so.

import { chartOptions, data, HEIGHT, said, whenLooksChange } from "./charts.js";

const charts = new Map(); // name -> { chart, place, shape, full }
const unfolded = new Set();
let order = null; // the column by which devices are sorted here, and whether downwards

function draw(figure) {
  const about = said(figure);
  const shape = JSON.stringify([about.unit, about.series.map((one) => [one.label, one.how])]);
  const place = figure.querySelector(".plot");
  const full = [about.x[0], about.x.at(-1)]; // not the chart's range, which is known only later
  const known = charts.get(about.name);
  if (known?.shape === shape) {
    const { chart } = known;
    const zoomed = chart.scales.x.min > known.full[0] || chart.scales.x.max < known.full[1];
    place.replaceWith(known.place);
    const width = known.place.clientWidth; // it changes when another chart comes to stand beside it
    if (width && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    chart.setData(data(about), !zoomed);
    if (zoomed) chart.redraw();
    known.full = full;
    return;
  }
  known?.chart.destroy();
  charts.set(about.name, { chart: new uPlot(chartOptions(about, place), data(about), place), place, shape, full });
}

// A body with the focus in it is not swapped: who used a mouse goes on reading.
function loosen(event) {
  if (event.detail) setTimeout(() => document.activeElement.blur());
}

const value = (row, column) => {
  const text = row.cells[column].dataset.value;
  return text === "" || text === undefined ? null : Number(text);
};

function sort(table) {
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.dataset.key === order.key);
  if (column < 0) return;
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", order.down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [one, two] = [value(a, column), value(b, column)];
    if (one === null || two === null) return (one === null) - (two === null);
    return order.down ? two - one : one - two;
  });
  table.tBodies[0].append(...rows);
}

function sortable(table) {
  if (order) sort(table);
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("a") && event.target.closest("th");
    if (!head || table.dataset.part !== undefined) return; // sorted by the server, over all devices
    event.preventDefault();
    order = { key: head.dataset.key, down: head.getAttribute("aria-sort") !== "descending" };
    sort(table);
    loosen(event);
  });
}

export function enhance(body) {
  body.querySelectorAll("figure.chart").forEach(draw);
  body.querySelectorAll("table.sortable").forEach(sortable);
  body.querySelectorAll("details").forEach((one) => {
    const summary = one.querySelector("summary");
    const name = one.dataset.keep ?? summary.textContent;
    if (unfolded.has(name)) one.open = true;
    one.addEventListener("toggle", () => {
      if (one.open) unfolded.add(name);
      else unfolded.delete(name);
      if (one.open) one.querySelectorAll("figure.chart").forEach(draw); // now they have a width
    });
    summary.addEventListener("click", loosen);
  });
}

function drawAnew() {
  const figures = document.querySelectorAll("figure.chart");
  for (const { chart } of charts.values()) chart.destroy();
  charts.clear();
  figures.forEach(draw);
}

whenLooksChange(drawAnew);
