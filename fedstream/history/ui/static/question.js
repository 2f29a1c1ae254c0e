// What JavaScript adds to a question that is being worked on: its page follows without loading again,
// so the keyboard's place is kept. Without it, the page loads itself again.

import { drawAll } from "./page.js";

const PAUSE_MS = 500;

async function follow(work) {
  while (work.hasAttribute("data-going")) {
    await new Promise((done) => setTimeout(done, PAUSE_MS));
    let fresh;
    try {
      const answer = await fetch(location.href);
      fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    } catch (error) {
      const told = document.createElement("p");
      told.className = "warning";
      told.textContent = `No answer from the server: is it still running? (${error.message})`;
      work.replaceChildren(told);
      return;
    }
    const now = fresh.querySelector("#work");
    const [told, tells] = [document.querySelector("#told"), fresh.querySelector("#told")];
    if (told.textContent !== tells.textContent) told.textContent = tells.textContent;
    if (now.hasAttribute("data-going")) {
      // The button stays where it is: somebody may be about to press it.
      work.querySelector("progress").value = now.querySelector("progress").value;
      if (!work.querySelector("details[open]")) {
        work.querySelector(".charts").replaceWith(now.querySelector(".charts"));
      }
    } else {
      const had = work.contains(document.activeElement);
      work.removeAttribute("data-going");
      work.replaceChildren(...now.childNodes);
      if (had) work.querySelector("#found")?.focus();
      const [again, is] = [document, fresh].map((one) => one.querySelector("form.filter button"));
      again.disabled = is.disabled;
      again.textContent = is.textContent;
    }
    drawAll();
  }
}

const work = document.querySelector("#work");
if (work) follow(work);
