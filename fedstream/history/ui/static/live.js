// Keeps the live page up to date: swaps the parts that changed.
// Without it, the page is loaded again every few seconds.

const AGAIN_MS = 3000; // when the browser has given up connecting

const connection = document.querySelector("#connection");
let lostAt = null;
let enhance = () => {};

function tell(text, kind = "") {
  connection.textContent = text;
  connection.className = kind;
}

// As the server writes it, on all pages: no browser's own format, no local time.
const moment = (seconds) => `${new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ")} UTC`;

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

function connect() {
  const source = new EventSource("/live/stream");
  const on = (name, act) => source.addEventListener(name, (event) => act(JSON.parse(event.data)));
  source.addEventListener("open", () => { lostAt = null; tell("Live"); });
  on("parts", (parts) => { tell("Live"); swap(parts); });
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
