// What JavaScript adds to the panels of the live page. Without it, charts are tables and a column's
// header is a link. `enhance` is called for a panel's body at load and after each swap: charts keep
// their canvas and zoom, tables their order, what was unfolded stays so.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = ["one", "two", "three"];
const HEIGHT = 230;
const charts = new Map(); // name -> { chart, place, shape, full }
const unfolded = new Set();
let order = null; // the column by which devices are sorted here, and whether downwards

function series(one, index) {
  const stroke = colour(COLOURS[index % COLOURS.length]);
  const about = { label: one.label, scale: one.scale, stroke, width: 1.6 };
  if (one.how === "bars") {
    return { ...about, fill: `${stroke}66`, paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
  }
  if (one.how === "points") return { ...about, paths: () => null, points: { show: true, size: 6, fill: stroke } };
  const dash = index ? [8, 4] : undefined; // told apart without colours, too
  return { ...about, dash, spanGaps: true, points: { show: false } };
}

function axis(about) {
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("text"), grid: line, ticks: line, ...about };
}

function made(about, data, place) {
  const axes = [axis({ label: about.unit, labelSize: 22, size: 34 }), axis({ size: 58 })];
  const right = about.series.some((one) => one.scale === "right");
  if (right) axes.push(axis({ side: 1, scale: "right", size: 52, grid: { show: false } }));
  const bars = about.series.some((one) => one.how === "bars");
  const fromZero = { range: { min: { soft: 0, mode: 1, pad: 0 }, max: { pad: 0.08 } } };
  return new uPlot({
    width: place.clientWidth || 320, height: HEIGHT, axes,
    scales: {
      x: { time: false, range: bars ? (_, low, high) => [low - 0.6, high + 0.6] : undefined },
      y: fromZero, ...(right && { right: fromZero }),
    },
    series: [{ label: about.unit }, ...about.series.map(series)],
    cursor: { drag: { x: true, y: false } },
  }, data, place);
}

function draw(figure) {
  const about = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  const data = [about.x, ...about.series.map((one) => one.values)];
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
    chart.setData(data, !zoomed);
    if (zoomed) chart.redraw();
    known.full = full;
    return;
  }
  known?.chart.destroy();
  charts.set(about.name, { chart: made(about, data, place), place, shape, full });
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
    one.addEventListener("toggle", () => (one.open ? unfolded.add(name) : unfolded.delete(name)));
    summary.addEventListener("click", loosen);
  });
}

function drawAnew() {
  const figures = document.querySelectorAll("figure.chart");
  for (const { chart } of charts.values()) chart.destroy();
  charts.clear();
  figures.forEach(draw);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawAnew();
});

// On a page of its own nothing is swapped.
document.querySelectorAll("[data-alone]").forEach(enhance);
