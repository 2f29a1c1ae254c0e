// What JavaScript adds to a report in one file: a table that sorts, a slider over its versions, and
// charts drawn in the width that they have once they are shown. Without it, devices are in order and
// versions are a list.

import { drawAll } from "./page.js";

function sortable(table) {
  const headers = [...table.tHead.rows[0].cells];
  const value = (row, column) => parseFloat(row.cells[column].dataset.value);
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") !== "descending";
      headers.forEach((one) => one.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y); // what has no value comes last
        return down ? y - x : x - y;
      });
      body.append(...rows);
    });
  });
}

function slide(bar, moments) {
  const range = bar.querySelector("input");
  const numbers = moments.map((one) => Number(one.querySelector("[id]").id.split("-")[1]));
  const show = (place) => {
    moments.forEach((one, at) => {
      one.hidden = at !== place;
      one.open = at === place;
    });
    range.value = place;
    const version = moments[place].querySelector("[id]").id;
    range.setAttribute("aria-valuetext", version.replace("-", " "));
    return version;
  };
  const wanted = () => moments.findIndex((one) => one.querySelector("[id]").id === location.hash.slice(1));
  bar.hidden = false;
  range.max = moments.length - 1;
  const go = (place) => history.replaceState(null, "", `#${show(place)}`);
  range.addEventListener("input", () => go(Number(range.value)));
  addEventListener("moment", (event) => {
    const apart = numbers.map((number) => Math.abs(number - event.detail));
    go(apart.indexOf(Math.min(...apart)));
    bar.scrollIntoView();
  });
  addEventListener("hashchange", () => wanted() >= 0 && show(wanted()));
  show(wanted() >= 0 ? wanted() : moments.length - 1);
}

document.querySelectorAll("table.devices").forEach(sortable);
document.querySelector(".axes").addEventListener("change", drawAll);
const moments = [...document.querySelectorAll("details.moment")];
if (moments.length) slide(document.querySelector("#slide"), moments);
