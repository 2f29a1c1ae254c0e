// Keeps the live page up to date: swaps the parts that changed, and appends to the log what happens.
// Without it, the page is loaded again every few seconds.

const LINES = 500; // of the log
const AGAIN_MS = 3000; // when the browser has given up connecting

const log = document.querySelector("#log");
const connection = document.querySelector("#connection");
let after = log.dataset.after;
let lostAt = null;
let enhance = () => {};

function tell(text, kind = "") {
  connection.textContent = text;
  connection.className = kind;
}

// As the server writes it, on all pages: no browser's own format, no local time.
const moment = (seconds) => `${new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ")} UTC`;

function later(one, other) {
  const [a, b] = [one, other].map((id) => id.split("-").map(Number));
  return a[0] > b[0] || (a[0] === b[0] && a[1] > b[1]);
}

function isRead(body) {
  const chosen = getSelection();
  const selected = chosen.type === "Range" && body.contains(chosen.anchorNode);
  return selected || (body !== document.activeElement && body.contains(document.activeElement));
}

const held = new Map(); // part that is read -> what it would show
const bodyOf = (name) => document.querySelector(`#part-${name}`);

function swap(parts) {
  for (const [name, html] of Object.entries(parts)) {
    const body = bodyOf(name);
    if (!body) continue;
    if (isRead(body)) hold(name, body, html);
    else show(name, body, html);
  }
}

function show(name, body, html) {
  if (held.delete(name)) body.parentElement.querySelector(".paused")?.remove();
  const { scrollLeft, scrollTop } = body;
  body.innerHTML = html; // our own server's, escaped there
  body.scrollTo(scrollLeft, scrollTop);
  enhance(body);
}

function hold(name, body, html) {
  const begins = !held.has(name);
  held.set(name, html);
  if (!begins || !body.classList.contains("body")) return;
  const sign = document.createElement("p");
  const button = document.createElement("button");
  sign.className = "paused";
  sign.setAttribute("role", "status");
  button.type = "button";
  button.textContent = "Go on (Esc)";
  button.addEventListener("mousedown", (event) => event.preventDefault()); // or it goes with the focus
  button.addEventListener("click", () => leave(body));
  sign.append("Paused ", button);
  body.before(sign);
}

// Parts that nobody reads any more catch up.
function goOn() {
  for (const [name, html] of held) {
    const body = bodyOf(name);
    if (!isRead(body)) show(name, body, html);
  }
}

function leave(body) {
  getSelection().removeAllRanges();
  body.focus({ preventScroll: true }); // its frame: what is inside may go
  goOn();
}

function append(rows) {
  const lines = document.createDocumentFragment();
  for (const [id, time, kind, text] of rows) {
    if (!later(id, after)) continue;
    after = id;
    const line = document.createElement("li");
    line.dataset.id = id;
    const at = document.createElement("time");
    at.dateTime = new Date(1000 * time).toISOString();
    at.textContent = moment(time);
    const what = document.createElement("strong");
    what.textContent = kind;
    line.append(at, " ", what, ` ${text}`);
    lines.prepend(line);
  }
  log.prepend(lines);
  while (log.children.length > LINES) log.lastElementChild.remove();
}

function connect() {
  const source = new EventSource(`/live/stream?after=${encodeURIComponent(after)}`);
  const on = (name, act) => source.addEventListener(name, (event) => act(JSON.parse(event.data), event));
  source.addEventListener("open", () => { lostAt = null; tell("Live"); });
  on("parts", (parts) => { tell("Live"); swap(parts); });
  on("rows", append);
  on("anew", (_, event) => {
    after = event.lastEventId;
    const line = document.createElement("li");
    line.className = "gap";
    line.textContent = "Here something is missing: the server no longer has all that happened meanwhile.";
    log.prepend(line);
  });
  on("trouble", (text) => tell(text, "warning"));
  on("over", (state) => {
    if (state !== "finished") return; // another coordinator goes on, or the same later: connect again
    source.close();
    tell("The run is finished: this is how it ended.");
    document.body.dataset.over = state;
  });
  source.addEventListener("error", () => {
    lostAt ??= Date.now() / 1000;
    tell(`Not connected since ${moment(lostAt)}: trying again`, "warning");
    if (source.readyState !== EventSource.CLOSED) return; // it connects again by itself
    setTimeout(async () => {
      const answer = await fetch("/live/stream", { method: "HEAD" }).catch(() => null);
      if (answer?.status === 401) location.reload();
      else connect();
    }, AGAIN_MS);
  });
}

document.addEventListener("selectionchange", goOn);
document.addEventListener("focusout", () => setTimeout(goOn)); // once it is known where to
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") [...held.keys()].map(bodyOf).filter(isRead).forEach(leave);
});
connect();
import("/static/live-panels.js").then((panels) => {
  enhance = panels.enhance;
  document.querySelectorAll(".body, #part-headline").forEach(enhance);
}).catch(() => {});
