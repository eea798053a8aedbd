// A group's frames as a map. Frames are interchangeable, so a cell is no particular frame: what a model holds stays where
// it was drawn, what comes takes cells that are free, and a page that arrives turns from outline to colour in place.

const MOST_CELLS = 1024;

export class MemoryMap {
  constructor(hueOf) {
    this.hueOf = hueOf;
    this.cells = []; // a key or null, each
    this.element = document.createElement("div");
    this.element.className = "map";
    this.element.setAttribute("role", "img");
  }

  show(group) {
    const scale = Math.max(1, Math.ceil(group.frames / MOST_CELLS)); // frames a cell
    const count = Math.ceil(group.frames / scale);
    if (this.cells.length !== count) {
      this.cells = new Array(count).fill(null);
      this.element.replaceChildren(...this.cells.map(() => Object.assign(document.createElement("i"), { className: "cell" })));
      this.element.style.setProperty("--cell", count > 512 ? "8px" : count > 160 ? "12px" : "18px");
    }
    const wanted = new Map(group.holdings.map((one) => [`${one.use} ${one.models.join(" ")}`, { ...one, cells: Math.max(1, Math.round(one.frames / scale)) }]));
    this.#assign(wanted);
    this.cells.forEach((key, place) => this.#paint(this.element.children[place], key && wanted.get(key)));
    this.light(this.lit);
    this.element.setAttribute("aria-label", describe(group));
  }

  #assign(wanted) {
    const has = new Map();
    this.cells.forEach((key, place) => {
      const arrived = key?.replace(/^loading/, "weights");
      const count = (name) => has.get(name) ?? 0;
      const fits = (name) => name && count(name) < (wanted.get(name)?.cells ?? 0);
      this.cells[place] = fits(key) ? key : fits(arrived) ? arrived : null;
      if (this.cells[place]) has.set(this.cells[place], count(this.cells[place]) + 1);
    });
    let place = 0;
    for (const [key, { cells }] of wanted) {
      for (let missing = cells - (has.get(key) ?? 0); missing > 0; missing--) {
        while (place < this.cells.length && this.cells[place]) place++;
        if (place === this.cells.length) return;
        this.cells[place] = key;
      }
    }
  }

  #paint(cell, holding) {
    const [first, second] = holding?.models ?? [];
    cell.className = holding ? `cell ${holding.use}${second ? " shared" : ""}` : "cell";
    cell.dataset.models = holding ? holding.models.join(" ") : "";
    cell.title = holding ? `${holding.models.join(", ")}: ${{ weights: "weights", loading: "arriving", kv: "keys and values" }[holding.use]}` : "free";
    cell.style.setProperty("--hue", first ? this.hueOf(first) : "");
    if (second) cell.style.setProperty("--hue2", this.hueOf(second));
  }

  // Let one model's cells stand out; all of them again without a name.
  light(model) {
    this.lit = model;
    this.element.classList.toggle("dim", Boolean(model));
    for (const cell of this.element.children) cell.classList.toggle("lit", cell.dataset.models.split(" ").includes(model));
  }
}

function describe(group) {
  const frames = new Map();
  for (const one of group.holdings) for (const model of one.models) frames.set(model, (frames.get(model) ?? 0) + one.frames);
  const held = [...frames].map(([model, count]) => `${model} ${count}`).join(", ");
  return `Frames of group ${group.group}: ${held || "all free"}, of ${group.frames}`;
}
