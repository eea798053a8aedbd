// Loads and page-outs of the last two minutes, a lane a model, now at the right.

const SPAN = 120; // seconds
const MOST_LANES = 10;

export class Timeline {
  constructor(element, hueOf) {
    this.element = element;
    this.hueOf = hueOf;
    this.swaps = [];
    this.loading = new Map(); // model → since
  }

  add(swap) {
    this.swaps.push(swap);
  }

  // What is loading now, by what the state says of the models.
  follow(models, now) {
    for (const [name, model] of models) {
      if (model.state !== "loading") this.loading.delete(name);
      else if (!this.loading.has(name)) this.loading.set(name, now);
    }
    for (const name of this.loading.keys()) if (!models.has(name)) this.loading.delete(name);
  }

  draw(now) {
    this.swaps = this.swaps.filter((swap) => swap.at + swap.seconds > now - SPAN);
    const lanes = new Map();
    const lane = (model) => lanes.get(model) ?? lanes.set(model, []).get(model);
    for (const swap of this.swaps) lane(swap.model).push(bar(swap, now));
    for (const [model, since] of this.loading) lane(model).push(bar({ way: "now", at: since, seconds: now - since }, now));
    const names = [...lanes.keys()].sort().slice(0, MOST_LANES);
    this.element.replaceChildren(...names.map((name) => this.#lane(name, lanes.get(name))), names.length ? axis() : still());
    const loads = this.swaps.filter((swap) => swap.way === "in").length;
    this.element.setAttribute("aria-label", `${loads} loads and ${this.swaps.length - loads} page-outs in the last two minutes`);
  }

  #lane(name, bars) {
    const lane = document.createElement("div");
    lane.className = "lane";
    lane.style.setProperty("--hue", this.hueOf(name));
    const label = Object.assign(document.createElement("b"), { textContent: name, title: name });
    const track = Object.assign(document.createElement("div"), { className: "track" });
    track.append(...bars);
    lane.append(label, track);
    return lane;
  }
}

function bar(swap, now) {
  const from = Math.max(0, 1 - (now - swap.at) / SPAN);
  const to = Math.min(1, 1 - (now - swap.at - swap.seconds) / SPAN);
  const element = document.createElement("div");
  element.className = `bar ${swap.error ? "failed" : swap.way}`;
  element.style.left = `min(${100 * from}%, 100% - 4px)`;
  element.style.width = `${100 * Math.max(0, to - from)}%`;
  element.title = `${{ in: "paged in", out: "paged out", now: "loading for" }[swap.way]} ${swap.seconds.toFixed(2)} s`;
  return element;
}

function axis() {
  const lane = Object.assign(document.createElement("div"), { className: "lane axis" });
  const marks = document.createElement("span");
  marks.append(...["−2 min", "−90 s", "−1 min", "−30 s", "now"].map((text) => Object.assign(document.createElement("i"), { textContent: text })));
  lane.append(document.createElement("b"), marks);
  return lane;
}

function still() {
  return Object.assign(document.createElement("p"), { className: "still", textContent: "Nothing was swapped." });
}
