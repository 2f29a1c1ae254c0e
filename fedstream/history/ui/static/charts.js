// How all pages draw their charts: what a figure says, as uPlot takes it, in the style sheet's colours.

export const HEIGHT = 230;
const COLOURS = ["one", "two", "three"];
const WHOLE = [...Array(12).keys()].flatMap((n) => [1, 2, 5].map((one) => one * 10 ** n));

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function series(one, index) {
  const stroke = colour(COLOURS[index % COLOURS.length]);
  const about = { label: one.label, scale: one.scale, stroke, width: 1.6 };
  if (one.how === "bars") {
    return { ...about, fill: `${stroke}66`, paths: uPlot.paths.bars({ size: [0.7, 60] }), points: { show: false } };
  }
  if (one.how === "points") return { ...about, paths: () => null, points: { show: true, size: 5, fill: stroke } };
  const dash = index ? [8, 4] : undefined; // told apart without colours, too
  return { ...about, dash, spanGaps: true, points: { fill: colour("back") } };
}

function axis(about) {
  const line = { stroke: colour("line"), width: 1 };
  return { stroke: colour("text"), grid: line, ticks: line, ...about };
}

// There is no version between two, and nothing is late by half of one: no ticks there.
const steps = (values) => (values.every((one) => one === null || Number.isInteger(one)) ? { incrs: WHOLE } : {});

export const said = (figure) => JSON.parse(figure.querySelector('script[type="application/json"]').textContent);

export const data = (about) => [about.x, ...about.series.map((one) => one.values)];

export function chartOptions(about, place) {
  const left = about.series.filter((one) => one.scale !== "right").flatMap((one) => one.values);
  const axes = [
    axis({ label: about.unit, labelSize: 22, size: 34, ...steps(about.x) }),
    axis({ size: 58, ...steps(left) }),
  ];
  const right = about.series.some((one) => one.scale === "right");
  if (right) axes.push(axis({ side: 1, scale: "right", size: 52, grid: { show: false } }));
  const bars = about.series.some((one) => one.how === "bars");
  const fromZero = { range: { min: { soft: 0, mode: 1, pad: 0 }, max: { pad: 0.08 } } };
  return {
    width: place.clientWidth || 320, height: HEIGHT, axes,
    scales: {
      x: { time: false, range: bars ? (_, low, high) => [low - 0.6, high + 0.6] : undefined },
      y: fromZero, ...(right && { right: fromZero }),
    },
    series: [{ label: about.unit }, ...about.series.map(series)],
    cursor: { drag: { x: true, y: false } },
  };
}

// Colours come from the style sheet and widths from the page: charts are drawn anew when either changes.
export function whenLooksChange(draw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    draw();
  });
}
