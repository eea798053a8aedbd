// The status page: the state that the daemon's events tell of, drawn anew where it changed. Everything that comes from the
// daemon is put in as text, never as markup.

import { ask, follow, KeyWanted } from "./events.js";
import { MemoryMap } from "./memory.js";
import { Timeline } from "./timeline.js";

const KEY = "gswapd admin key";
const MOST_LINES = 100;
const PATIENCE = 10000; // milliseconds that an action is waited for; it goes on without

const $ = (id) => document.getElementById(id);
const make = (name, className = "", text = "") => Object.assign(document.createElement(name), { className, textContent: text });

let state = {};
let key = sessionStorage.getItem(KEY) ?? "";
const rows = new Map();
const maps = new Map();
const hues = new Map();
const loads = []; // wall clock, seconds
let skew = 0; // seconds that the daemon's clock is ahead of ours
const now = () => Date.now() / 1000 + skew;

const hueOf = (model) => hues.get(model) ?? hues.set(model, Math.round(250 + 137.5 * hues.size) % 360).get(model);
const timeline = new Timeline($("timeline"), hueOf);

// ---- words

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}
const seconds = (value) => (value < 1 ? `${Math.round(1000 * value)}\u00a0ms` : value < 100 ? `${value.toFixed(1)}\u00a0s` : `${Math.round(value / 60)}\u00a0min`);
const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });
const reasons = { memory: "to make room", idle: "at the end of its time", evicted: "as asked", removed: "removed from the store" };

function shares(sources) {
  const all = Object.values(sources).reduce((sum, part) => sum + part, 0);
  return Object.entries(sources).map(([name, part]) => `${name.replace("_", " ")} ${Math.round((100 * part) / all)}\u00a0%`).join(", ");
}

// ---- the state

const merge = (patch) => {
  for (const [section, entries] of Object.entries(patch)) {
    state[section] ??= {};
    for (const [name, value] of Object.entries(entries)) {
      if (value === null) delete state[section][name];
      else state[section][name] = value;
    }
  }
};

function heard(event, data) {
  if (event === "state") {
    state = data;
    Object.keys(state.models).sort().forEach(hueOf);
    draw();
  } else if (event === "change") {
    merge(data);
    draw();
  } else if (event === "swap") {
    timeline.add(data);
    if (data.way === "in") loads.push(data.at + data.seconds);
    tell(data.at + data.seconds, sentence(data), data.model, data.error);
    timeline.draw(now());
    drawTotals();
  } else if (event === "suspension") {
    const cost = data.lost ? `${data.lost} tokens to compute again` : `${bytes(data.kept)} kept`;
    tell(data.at, `was suspended for another: ${cost}`, data.model);
  } else if (event === "worker") {
    tell(data.at, `Workers of group ${data.group} were ${data.what}`, null, true);
  }
}

function sentence(swap) {
  if (swap.error) return `could not be loaded: ${swap.error}`;
  if (swap.way === "out") return `gave up ${swap.pages} pages ${reasons[swap.reason] ?? swap.reason}, unused for ${seconds(swap.idle)}`;
  const from = Object.keys(swap.sources).length ? ` from ${shares(swap.sources)}` : "";
  return `paged in ${swap.pages} pages in ${seconds(swap.seconds)}${from}`;
}

function tell(at, text, model, bad) {
  $("happened").prepend(line(at, text, model, bad));
  while ($("happened").children.length > MOST_LINES) $("happened").lastChild.remove();
}

function line(at, text, model, bad) {
  const item = make("li", bad ? "bad" : "");
  item.append(make("time", "", clock(at)));
  const said = make("span");
  if (model) {
    const swatch = make("i", "swatch");
    swatch.style.setProperty("--hue", hueOf(model));
    said.append(swatch, make("b", "", model), ` ${text}`);
  } else said.append(text);
  item.append(said);
  return item;
}

// ---- drawing

function draw() {
  health(state.daemon.draining ? "draining" : state.daemon.live ? "live" : "not ready");
  drawModels();
  drawMemory();
  drawWorkers();
  drawTotals();
  timeline.follow(new Map(Object.entries(state.models)), now());
  timeline.draw(now());
  lookAtDecisions();
}

function health(what) {
  $("health").textContent = what;
  $("health").className = `pill ${{ live: "live", "not ready": "down" }[what] ?? "late"}`;
}

function drawTotals() {
  const models = Object.values(state.models ?? {});
  const sum = (field) => models.reduce((total, model) => total + model[field], 0);
  while (loads.length && loads[0] < now() - 60) loads.shift();
  $("resident").textContent = `${models.filter((model) => model.resident_pages).length} of ${models.length}`;
  $("running").textContent = sum("running");
  $("waiting").textContent = sum("waiting");
  $("rate").textContent = loads.length;
}

function drawModels() {
  const names = Object.keys(state.models).sort();
  for (const name of [...rows.keys()]) {
    if (!state.models[name]) {
      rows.get(name).element.remove();
      rows.delete(name);
    }
  }
  names.forEach((name, place) => {
    if (!rows.has(name)) {
      const row = new Row(name);
      rows.set(name, row);
      $("rows").insertBefore(row.element, $("rows").children[place] ?? null);
    }
    rows.get(name).show(state.models[name]);
  });
  $("none").hidden = names.length > 0;
  $("problems").replaceChildren(...Object.entries(state.problems).map(([name, why]) => make("li", "", `${name} cannot be served: ${why}`)));
  filter();
}

class Row {
  constructor(name) {
    this.name = name;
    this.element = make("tr");
    this.element.style.setProperty("--hue", hueOf(name));
    this.title = make("th");
    this.title.scope = "row";
    this.aliases = make("small");
    this.title.append(make("i", "swatch"), name, this.aliases);
    this.state = make("td", "state");
    this.held = make("td", "held");
    this.meter = Object.assign(make("meter"), { min: 0 });
    this.size = make("span");
    this.held.append(make("div"));
    this.held.firstChild.append(this.meter, this.size);
    this.requests = make("td", "requests");
    this.load = make("td", "load");
    const actions = make("td", "actions");
    this.buttons = Object.fromEntries(["load", "evict", "pin"].map((action) => [action, this.#button(action)]));
    actions.append(make("div"));
    actions.firstChild.append(...Object.values(this.buttons));
    this.element.append(this.title, this.state, this.held, this.requests, this.load, actions);
    for (const event of ["mouseenter", "focusin"]) this.element.addEventListener(event, () => maps.forEach((map) => map.light(name)));
    for (const event of ["mouseleave", "focusout"]) this.element.addEventListener(event, () => maps.forEach((map) => map.light(null)));
  }

  #button(action) {
    const button = make("button", "", action);
    button.type = "button";
    button.onclick = () => button.getAttribute("aria-disabled") === "true" || act(this.name, action === "pin" && this.pinned ? "unpin" : action);
    button.setAttribute("aria-label", `${action} ${this.name}`);
    return button;
  }

  show(model) {
    this.pinned = model.pinned;
    this.aliases.textContent = model.aliases.join(", ");
    this.state.className = `state ${model.state}`;
    this.state.replaceChildren(model.state, ...(model.reason ? [make("div", "reason", model.reason)] : []));
    Object.assign(this.meter, { max: model.total_pages, value: model.resident_pages });
    this.meter.setAttribute("aria-label", `pages of ${this.name} in memory`);
    const part = model.resident_bytes && model.resident_bytes < model.total_bytes ? `${bytes(model.resident_bytes)} of ` : "";
    this.size.textContent = part + bytes(model.total_bytes);
    const busy = [model.running && `${model.running} running`, model.waiting && `${model.waiting} waiting`, model.oldest_wait > 0.5 && `oldest ${seconds(model.oldest_wait)}`];
    this.requests.textContent = busy.filter(Boolean).join(", ");
    const last = model.last_load;
    this.load.textContent = last && !last.error ? seconds(last.seconds) : "";
    this.load.title = last && !last.error ? `${last.pages} pages at ${clock(last.at)}` : "";
    this.#enable("load", model.resident_pages < model.total_pages);
    this.#enable("evict", !model.pinned && (model.resident_pages > 0 || model.state === "loading"));
    this.buttons.pin.textContent = model.pinned ? "pinned" : "pin";
    this.buttons.pin.setAttribute("aria-pressed", model.pinned);
  }

  #enable(action, possible) {
    this.buttons[action].setAttribute("aria-disabled", !possible);
  }
}

function drawMemory() {
  for (const name of [...maps.keys()]) {
    if (!state.memory[name]) {
      maps.get(name).box.remove();
      maps.delete(name);
    }
  }
  for (const [name, group] of Object.entries(state.memory)) {
    if (!maps.has(name)) {
      const map = new MemoryMap(hueOf);
      map.box = make("div", "group");
      map.caption = make("p");
      map.box.append(map.caption, map.element);
      maps.set(name, map);
      $("groups").append(map.box);
    }
    const map = maps.get(name);
    const held = group.holdings.reduce((sum, one) => sum + one.frames, 0);
    const size = group.up ? `${bytes(held * group.page_bytes)} of ${bytes(group.frames * group.page_bytes)} held` : "down";
    map.caption.replaceChildren(make("b", "", name), make("span", "", group.ranks > 1 ? `${size}, on each of ${group.ranks} ranks` : size));
    map.show(group);
  }
}

function drawWorkers() {
  $("workers").replaceChildren(...Object.values(state.workers).map((worker) => {
    const tier = worker.host_tier ? `, host tier ${worker.host_tier.used} of ${worker.host_tier.slots} pages` : "";
    const restarts = worker.restarts ? `, ${worker.restarts} restarts` : "";
    return make("span", worker.state === "up" ? "" : "down", `${worker.group}/${worker.rank} ${worker.state} on ${worker.device} by ${worker.reader}${tier}${restarts}`);
  }));
}

function filter() {
  const wanted = $("filter").value.toLowerCase();
  for (const [name, row] of rows) row.element.hidden = !name.toLowerCase().includes(wanted);
}

// ---- decisions

let looking = false;
async function lookAtDecisions() {
  if (looking) return;
  looking = true;
  await new Promise((resume) => setTimeout(resume, 1000)); // what changes meanwhile is seen with it
  looking = false;
  try {
    const { decisions } = await (await ask("GET", "admin/decisions", key)).json();
    $("decisions").replaceChildren(...decisions.map((one) => line(one.at, one.message, one.model, one.kind === "refused")));
  } catch (error) {
    if (error.status) notice(error.message); // else the daemon is away, which the events notice
  }
}

// ---- what a person does

async function act(name, action) {
  try {
    await ask("POST", `admin/models/${encodeURIComponent(name)}/${action}`, key, AbortSignal.timeout(PATIENCE));
  } catch (error) {
    if (error.name !== "TimeoutError") notice(`${action} ${name}: ${error.message}`);
  }
}

function notice(text) {
  const box = make("p", "", text);
  $("notices").append(box);
  setTimeout(() => box.remove(), 8000);
}

async function askForKey(why) {
  $("key-why").textContent = key ? why : "This daemon asks for its admin key. It is kept in this tab only.";
  $("key-value").value = "";
  $("key").showModal();
  await new Promise((resume) => ($("key").onclose = resume));
  key = $("key-value").value.trim();
  sessionStorage.setItem(KEY, key);
}

$("filter").oninput = filter;
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, dialog")) {
    event.preventDefault();
    $("filter").focus();
  }
});
setInterval(() => {
  if (state.models && !document.hidden) {
    timeline.draw(now());
    drawTotals();
  }
}, 1000);

for (;;) {
  try {
    await follow("admin/events", key, heard, (what, at) => {
      if (at) skew = Math.abs(at - Date.now() / 1000) < 2 ? 0 : at - Date.now() / 1000; // Date has whole seconds
      health(what === "late" ? "reconnecting" : "live");
    });
  } catch (error) {
    if (!(error instanceof KeyWanted)) throw error;
    await askForKey(error.message);
  }
}
