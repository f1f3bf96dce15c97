// Dialogs, toasts, the theme, copying, and keyboard shortcuts.

const dialog = document.getElementById("dialog");
const body = document.getElementById("dialog-body");
const toasts = document.getElementById("toasts");
const TOAST_MS = 8000;

// -- dialogs: htmx puts the answer into the body; what is done becomes a toast -------------------------------------------

document.addEventListener("htmx:after:swap", () => {
  const done = body.querySelector("[data-done]");
  if (done) {
    toast(done);
    body.replaceChildren(); // now: an update of the page may come before the event of closing, and must not open it again
    dialog.close();
    document.dispatchEvent(new CustomEvent("acted"));
  } else if (body.childElementCount && !dialog.open) {
    dialog.showModal();
  }
});
dialog.addEventListener("close", () => body.replaceChildren());

export function toast(content) {
  toasts.append(content);
  setTimeout(() => content.remove(), TOAST_MS);
}

function say(text) {
  const line = document.createElement("p");
  line.textContent = text;
  toast(line);
}

// htmx reports what it could not send: the server is away.
document.addEventListener("htmx:error", (event) => {
  if (event.detail.ctx?.request) say("The server did not answer; nothing is known to have changed. Try again.");
});

document.addEventListener("click", async (event) => {
  if (event.target.closest("[data-close]")) dialog.close();
  const copied = event.target.closest("[data-copy]");
  if (copied) {
    try {
      await navigator.clipboard.writeText(copied.dataset.copy);
      say("Copied");
    } catch {
      say("The browser did not allow copying");
    }
  }
});

// -- selecting rows: a checkbox in the head selects all; buttons that need a selection count it --------------------------

document.addEventListener("change", (event) => {
  const form = event.target.form;
  if (!form?.matches("[data-selection]")) return;
  if (event.target.matches("[data-all]")) {
    for (const box of form.querySelectorAll("[name=id]")) box.checked = event.target.checked;
  }
  const count = form.querySelectorAll("[name=id]:checked").length;
  for (const button of form.querySelectorAll("[data-counts]")) {
    button.disabled = count === 0;
    button.textContent = count ? `${button.dataset.counts} ${count}` : button.dataset.counts;
  }
});

// -- theme ---------------------------------------------------------------------------------------------------------------

document.getElementById("theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (isDark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  document.cookie = `heapline_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax`;
  document.dispatchEvent(new CustomEvent("theme"));
});

// -- keyboard ------------------------------------------------------------------------------------------------------------

const help = document.getElementById("keys-help");
const off = document.getElementById("keys-off");
const GO = { o: "/", t: "/topics", m: "/messages", d: "/dead", s: "/schedules", w: "/workers" };
let went = 0; // when "g" was pressed

off.checked = localStorage.getItem("keys-off") === "yes";
off.addEventListener("change", () => localStorage.setItem("keys-off", off.checked ? "yes" : "no"));
document.getElementById("show-keys")?.addEventListener("click", () => help.showModal());

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (off.checked || isTyping || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("search").focus();
  } else if (event.key === "?") {
    help.showModal();
  } else if (event.key === "p") {
    document.getElementById("link")?.click();
  } else if (event.key === "g") {
    went = event.timeStamp;
  } else if (event.key in GO && event.timeStamp - went < 1000) {
    location.href = document.body.dataset.root + GO[event.key];
  }
});
