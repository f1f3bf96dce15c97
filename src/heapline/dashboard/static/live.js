// Live updates. One tab of this browser holds the stream for all visible ones: the tab that has the lock leads. It opens a
// stream of all their views and passes events on. A hidden tab leaves; without locks (plain HTTP beyond this
// machine) every tab opens its own stream.

const link = document.getElementById("link");
if (link) start(link.dataset.live);

function start(view) {
  const me = crypto.randomUUID?.() ?? String(Math.random());
  const root = document.body.dataset.root;
  const channel = "BroadcastChannel" in window ? new BroadcastChannel(`heapline${root}`) : null;
  const canShare = channel !== null && navigator.locks !== undefined;
  const views = new Map(); // of the leader: tab -> view
  let source = null;
  let opening = 0;
  let release = null; // ends this tab's lead, or its wait for it
  let leads = false;
  let isPaused = false;
  let failures = 0;

  // -- the stream ---------------------------------------------------------------------------------------------------------

  function open() {
    clearTimeout(opening);
    opening = setTimeout(() => {
      source?.close();
      const wanted = [...new Set(views.values())].map((each) => `view=${encodeURIComponent(each)}`);
      if (!wanted.length) return;
      source = new EventSource(`${root}/live?${wanted.join("&")}`);
      source.onmessage = (event) => {
        failures = 0;
        pass({ kind: "update", update: JSON.parse(event.data) });
      };
      source.addEventListener("signed-out", () => {
        source.close();
        pass({ kind: "state", state: "signed-out" });
      });
      source.onerror = () => {
        source.close();
        pass({ kind: "state", state: "reconnecting" });
        failures += 1;
        opening = setTimeout(open, Math.min(10_000, 500 * 2 ** Math.min(failures, 5)));
      };
    }, 30);
  }

  function close() {
    clearTimeout(opening);
    source?.close();
    source = null;
    leads = false;
    views.clear();
  }

  function pass(message) {
    receive(message);
    if (canShare) channel.postMessage(message);
  }

  function want(tab, wanted) {
    if (views.get(tab) === wanted) return;
    if (wanted) views.set(tab, wanted);
    else views.delete(tab);
    open();
  }

  // -- who leads ----------------------------------------------------------------------------------------------------------

  function join() {
    if (release || isPaused) return;
    if (!canShare) {
      leads = true;
      want(me, view);
      release = close;
      return;
    }
    channel.postMessage({ kind: "want", tab: me, view });
    const waiting = new AbortController();
    release = () => waiting.abort();
    navigator.locks
      .request(`heapline${root}`, { signal: waiting.signal }, () => {
        leads = true;
        want(me, view);
        channel.postMessage({ kind: "roll-call" });
        return new Promise((resolve) => {
          release = () => {
            close();
            resolve();
          };
        });
      })
      .catch(() => {}); // this tab left before it led
  }

  function leave() {
    release?.();
    release = null;
    if (canShare) channel.postMessage({ kind: "want", tab: me, view: "" });
  }

  if (canShare) {
    channel.onmessage = ({ data }) => {
      if (data.kind === "want" && leads) want(data.tab, data.view);
      else if (data.kind === "roll-call" && release && !leads) channel.postMessage({ kind: "want", tab: me, view });
      else if (release) receive(data);
    };
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? leave() : join()));
  addEventListener("pagehide", leave);
  addEventListener("pageshow", () => document.hidden || join());
  if (!document.hidden) join();

  let isLeaving = false; // for another page
  addEventListener("beforeunload", () => {
    isLeaving = true;
  });

  // -- what arrives -------------------------------------------------------------------------------------------------------

  let state = "live";
  let lastAt = Date.now();
  let announcedAt = 0;

  function receive(message) {
    if (isPaused) return;
    if (message.kind === "state") show(message.state);
    else if (message.kind === "update") {
      lastAt = Date.now();
      if (message.update.view === view) apply(message.update);
      else if (state === "reconnecting") show("live");
    }
  }

  function show(next) {
    if (next !== state) announce(next);
    state = next;
    const age = Math.round((Date.now() - lastAt) / 1000);
    const isStale = next === "reconnecting" && age >= 5;
    document.body.toggleAttribute("data-stale", isStale || next === "signed-out");
    const words = { live: "Live", paused: "Paused", "signed-out": "Signed out · log in", failed: "Not updated" };
    link.textContent = words[next] ?? (isStale ? `Reconnecting · ${age} s old` : "Reconnecting");
    link.className = `pill ${next === "live" ? "ok" : next === "paused" ? "" : "warn"}`;
  }

  function announce(next) {
    if (Date.now() - announcedAt < 10_000) return;
    announcedAt = Date.now();
    document.getElementById("announcer").textContent = `Updates: ${next}`;
  }

  setInterval(() => state === "reconnecting" && show(state), 1000);

  link.addEventListener("click", () => {
    if (state === "signed-out") location.reload();
    else if (isPaused) {
      isPaused = false;
      show("live");
      join();
    } else {
      leave();
      isPaused = true;
      show("paused");
    }
  });

  // -- the page -----------------------------------------------------------------------------------------------------------

  const ACTED_MS = 3000; // after a person's own change, its effect is shown at once
  let actedAt = 0;
  document.addEventListener("acted", () => {
    actedAt = Date.now();
  });
  const held = new Map(); // of rows that would move under the pointer: table -> their order

  function apply({ parts, order, error }) {
    show(error ? "failed" : "live");
    link.title = error;
    const fresh = new Map();
    for (const [id, html] of Object.entries(parts)) {
      const old = document.getElementById(id);
      if (old) htmx.swap({ sourceElement: old, target: old, swap: "outerMorph", text: html });
      else fresh.set(id, html);
    }
    for (const [id, ids] of Object.entries(order)) arrange(id, ids, fresh);
    // A list that has become empty is not among the parts: the page says something else in its place.
    const lists = [...document.querySelectorAll("#main tbody[id]")];
    if (!error && lists.some((rows) => rows.childElementCount && !(rows.id in order))) renew();
  }

  // Take the page's content from the server again: a list has come, or its last row has gone.
  let renewing = 0;
  async function renew() {
    const main = document.getElementById("main");
    clearTimeout(renewing);
    if (isLeaving) return;
    if (main.querySelector("input:focus, select:focus, textarea:focus")) {
      renewing = setTimeout(renew, 1000); // what is being typed stays
      return;
    }
    const answer = await fetch(location.href).catch(() => null); // a server that is away sends all when it is back
    if (!answer?.ok || answer.redirected) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    held.clear();
    main.replaceChildren(...page.getElementById("main").childNodes);
    htmx.process(main);
    offer();
  }

  function arrange(id, ids, fresh) {
    const rows = document.getElementById(id);
    if (!rows) {
      // The page showed that there is nothing; now there is something.
      if (ids.length) renew();
      return;
    }
    const now = [...rows.children].map((row) => row.id);
    const waiting = held.get(id)?.fresh ?? new Map();
    for (const [row, html] of fresh) waiting.set(row, html);
    if (now.length === ids.length && now.every((row, i) => row === ids[i])) {
      held.delete(id);
      offer();
    } else {
      held.set(id, { ids, fresh: waiting });
      const isUsed = (rows.matches(":hover") || rows.contains(document.activeElement)) && Date.now() > actedAt + ACTED_MS;
      if (isUsed) offer();
      else settle();
    }
  }

  function settle() {
    for (const [id, { ids, fresh }] of held) {
      const rows = document.getElementById(id);
      const wanted = ids.map((row) => document.getElementById(row) ?? element(fresh.get(row))).filter(Boolean);
      const isSame = rows.children.length === wanted.length && wanted.every((row, i) => row === rows.children[i]);
      if (!isSame) rows.replaceChildren(...wanted);
      htmx.process(rows);
    }
    held.clear();
    offer();
  }

  function element(html) {
    if (!html) return null;
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content.firstElementChild;
  }

  function offer() {
    let button = document.getElementById("moved");
    if (!held.size) button?.remove();
    else if (!button) {
      button = document.createElement("button");
      button.id = "moved";
      button.type = "button";
      button.className = "pill warn moved";
      button.textContent = "Order changed · apply";
      button.addEventListener("click", settle);
      document.getElementById("main").append(button);
    }
  }
}
