// What JavaScript adds to the pages: drawn charts, and a slider that follows. Without it, charts are
// tables and the slider is a form.

import { chartOptions, data, said, whenLooksChange } from "./charts.js";

const drawn = new Map();
const TWICE_MS = 300; // within which two clicks are a double click
const REST_MS = 40; // after which the slider rests: longer than a key that is held takes to repeat

function draw(figure) {
  const about = said(figure);
  const place = figure.querySelector(".plot");
  drawn.get(figure)?.destroy();
  const chart = new uPlot(chartOptions(about, place), data(about), place);
  drawn.set(figure, chart);
  const live = document.querySelector("nav") !== null;
  if (about.versions && !live) {  // in one file, a slider shows the version
    chart.over.addEventListener("click", () => {
      const at = chart.cursor.idx;
      if (at === null || at === undefined || chart.select.width !== 0) return;
      figure.dispatchEvent(new CustomEvent("moment", { detail: leads(about)[at], bubbles: true }));
    });
  }
  if (about.versions && live) {
    let shown = about;
    let range = "";
    let going = 0;
    chart.over.style.cursor = "pointer";
    chart.over.addEventListener("click", () => {
      const at = chart.cursor.idx;
      if (at === null || at === undefined || chart.select.width !== 0) return;
      const path = `/versions/${leads(shown)[at]}`;
      // Where there is something to return from, it may be the first of two clicks.
      clearTimeout(going);
      going = setTimeout(() => location.assign(path), shown === about ? 0 : TWICE_MS);
    });
    chart.over.addEventListener("dblclick", () => clearTimeout(going));
    if (figure.closest("[data-windows]")) chart.hooks.setScale = [() => {
      const { min, max } = chart.scales.x;
      if (range === `${min} ${max}`) return;
      range = `${min} ${max}`;
      closer(figure, chart, about, (finer) => {
        if (finer === shown) return;
        shown = finer;
        chart.setData(data(finer), false);
        chart.redraw();
      });
    }];
  }
}

const leads = (about) => (about.leads.length ? about.leads : about.x);

// A long run's curve has fewer points than the run has versions: ask for more where it is looked at.
function closer(figure, chart, about, show) {
  clearTimeout(figure.asking);
  figure.asking = setTimeout(async () => {
    const { min, max } = chart.scales.x;
    const inside = (x) => x >= min && x <= max;
    if (about.x.every(inside)) return show(about);
    const at = about.x.findIndex((x) => x >= min);
    const until = about.x.findLastIndex((x) => x <= max);
    const versions = leads(about);
    const query = new URLSearchParams(location.search);
    query.set("from", versions[Math.max(0, at - 1)]);
    query.set("until", versions[Math.min(versions.length - 1, until + 1)]);
    const answer = await fetch(`${location.pathname}?${query}`);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const found = page.querySelector(`figure[data-chart="${figure.dataset.chart}"] script`);
    if (found) show(merged(about, JSON.parse(found.textContent)));
  }, 100);
}

// The finer points where there are any, and the others around them.
function merged(about, finer) {
  const before = about.x.filter((x) => x < finer.x[0]).length;
  const after = about.x.findIndex((x) => x > finer.x.at(-1));
  const joined = (whole, part) => [...whole.slice(0, before), ...part, ...(after < 0 ? [] : whole.slice(after))];
  const series = about.series.map((one) => {
    const same = finer.series.find((other) => other.label === one.label);
    return { ...one, values: joined(one.values, same?.values ?? finer.x.map(() => null)) };
  });
  return { ...about, x: joined(about.x, finer.x), leads: joined(about.leads, finer.leads), series };
}

export function drawAll() {
  for (const [figure, chart] of drawn) {
    if (figure.isConnected) continue;
    chart.destroy();
    drawn.delete(figure);
  }
  document.querySelectorAll("figure.chart").forEach((one) => one.closest("details:not([open])") ?? draw(one));
}

// What is folded has no width: it is drawn when it is shown.
document.addEventListener("toggle", ({ target }) => {
  if (target.open && target.matches("details.more")) target.querySelectorAll("figure.chart").forEach(draw);
}, true);

const form = document.querySelector("form.slider");

function follow() {
  const range = form.elements.namedItem("version");
  const number = form.elements.namedItem("number");
  let asking = null;
  let resting = 0;

  const address = (models) => {
    const to = form.elements.namedItem("to").value.trim();
    const query = new URLSearchParams({ ...(to && { to }), ...(models && { models: "1" }) });
    return `/versions/${range.value}${query.size ? `?${query}` : ""}`;
  };

  // What the answer says is wrong with the form, beside the fields as they are now.
  function showProblems(page) {
    for (const name of ["version", "number", "to"]) {
      const id = `${name}-problem`;
      const fresh = page.getElementById(id);
      const shown = document.getElementById(id);
      if (shown?.textContent === fresh?.textContent) continue;  // don't have it read out again
      shown?.remove();
      if (fresh) document.getElementById("keys").before(fresh);
      if (name === "version") continue;  // its keys describe it
      const field = form.elements.namedItem(name);
      field.setAttribute("aria-invalid", String(Boolean(fresh)));
      fresh ? field.setAttribute("aria-describedby", id) : field.removeAttribute("aria-describedby");
    }
  }

  async function show(models) {
    asking?.abort();
    asking = new AbortController();
    try {
      const answer = await fetch(address(models), { signal: asking.signal });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("#moment") ?? page.querySelector("main > .warning");
      document.querySelector("#moment").replaceChildren(...(fresh.id ? fresh.childNodes : [fresh]));
      document.querySelector("#moment").dataset.version = range.value;
      document.querySelector("#moment").dataset.models = fresh.dataset.models ?? "no";
      document.title = page.title;
      showProblems(page);
      history.replaceState(null, "", address(false));
    } catch (error) {
      if (error.name === "AbortError") return;
      const told = document.createElement("p");
      told.className = "warning";
      told.textContent = `No answer: is fedstream ui still running? (${error.message})`;
      document.querySelector("#moment").replaceChildren(told);
    }
    if (!models) {
      clearTimeout(resting);
      resting = setTimeout(() => document.querySelector('#moment[data-models="no"] .more') && show(true), REST_MS);
    }
  }

  const move = (value) => {
    range.value = value;
    number.value = range.value;
    show(false);
  };
  range.addEventListener("input", () => move(range.value));
  form.addEventListener("submit", (event) => {
    // What is no number is the server's to answer: the slider would take it for its middle.
    if (!/^\d+$/.test(number.value.trim())) return;
    event.preventDefault();
    move(document.activeElement === range ? range.value : number.value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, .wide")) return;
    const here = Number(range.value);
    const tenth = Math.max(1, Math.round((range.max - range.min) / 10));
    const to = {
      ArrowLeft: here - 1, ArrowRight: here + 1, PageDown: here - tenth, PageUp: here + tenth,
      Home: range.min, End: range.max,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
  if (document.querySelector("#moment .more")) show(true);
}

drawAll();
if (form) follow();
whenLooksChange(drawAll);
