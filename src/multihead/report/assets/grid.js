// The overview: layers x heads, colored by one statistic, with its legend.

import { colorAt, rampCanvas } from "./color.js";
import { el, headName, select, svg, tip } from "./dom.js";

const LEGEND_BINS = 32;

/** The grid; `open(layer, head, byKey)` is called for a click, Enter or Space. */
export function overview(data, statistics, open) {
  let shown = statistics[0];
  let current = { layer: 0, head: 0 };
  const cells = new Map();
  const [label] = select(
    "Color by",
    statistics.map((item) => [item.name, item.label]),
    shown.name,
    (name) => {
      shown = statistics.find((item) => item.name === name);
      draw();
    },
  );
  const meaning = el("p", { class: "meaning", id: "grid-meaning" });
  const legend = el("div", { class: "legend" });
  const table = el(
    "div",
    {
      class: "grid",
      role: "grid",
      "aria-label": "Heads: a row is a layer, a column a head",
      "aria-describedby": "grid-meaning",
      on: {
        keydown: onKey,
        focusin: onFocus,
        focusout: () => tip(),
        pointerover: onFocus,
        pointerleave: () => tip(),
        click: onClick,
      },
    },
    headings(),
    Array.from({ length: data.layers }, (_, layer) => row(layer)),
  );
  table.style.setProperty("--heads", data.heads);
  const node = el(
    "div",
    { class: "overview" },
    label,
    meaning,
    legend,
    el("div", { class: "scroll" }, table),
    el(
      "p",
      { class: "hint" },
      "Click a cell, or move with the arrow keys and press Enter, to open a head. ",
      "The table below has the same values as text.",
    ),
  );

  function headings() {
    return el(
      "div",
      { role: "row", class: "grid-row" },
      el("span", { role: "columnheader" }, el("span", { class: "hidden" }, "Layer")),
      Array.from({ length: data.heads }, (_, head) =>
        el("span", { role: "columnheader", class: groupClass(head) }, `H${head}`),
      ),
    );
  }

  function row(layer) {
    return el(
      "div",
      { role: "row", class: "grid-row" },
      el("span", { role: "rowheader" }, `L${layer}`),
      Array.from({ length: data.heads }, (_, head) => {
        const cell = el("span", {
          role: "gridcell",
          class: `cell ${groupClass(head)}`,
          "data-layer": layer,
          "data-head": head,
          tabindex: layer || head ? -1 : 0,
        });
        cells.set(headName(layer, head), cell);
        return cell;
      }),
    );
  }

  // Heads that share a KV head stand together.
  function groupClass(head) {
    const group = data.heads / data.kvHeads;
    return group > 1 && head && head % group === 0 ? "apart" : "";
  }

  function draw() {
    meaning.textContent = `${shown.meaning}.`;
    for (const { layer, head } of data.allHeads()) {
      const cell = cells.get(headName(layer, head));
      const value = data.statistic(shown.name, layer, head);
      const known = Number.isFinite(value);
      cell.style.backgroundColor = known ? colorAt("amount", shown.share(value)) : "";
      cell.classList.toggle("unknown", !known);
      cell.setAttribute(
        "aria-label",
        `${headName(layer, head)}: ${shown.label} ${shown.write(value)}`,
      );
    }
    legend.replaceChildren(...legendParts(shown));
  }

  function place(event) {
    const cell = event.target.closest(".cell");
    return cell && { cell, layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) };
  }

  function onFocus(event) {
    const at = place(event);
    if (!at) return tip();
    return tip(at.cell, [
      `Layer ${at.layer}, head ${at.head}`,
      `${shown.label}: ${shown.write(data.statistic(shown.name, at.layer, at.head))}`,
    ]);
  }

  function onClick(event) {
    const at = place(event);
    if (!at) return;
    focusCell(at.layer, at.head, false);
    open(at.layer, at.head, false);
  }

  function onKey(event) {
    const at = place(event);
    if (!at) return;
    const { layer, head } = at;
    const moves = {
      ArrowUp: [layer - 1, head],
      ArrowDown: [layer + 1, head],
      ArrowLeft: [layer, head - 1],
      ArrowRight: [layer, head + 1],
      Home: [event.ctrlKey ? 0 : layer, 0],
      End: [event.ctrlKey ? data.layers - 1 : layer, data.heads - 1],
      PageUp: [0, head],
      PageDown: [data.layers - 1, head],
    };
    if (event.key === "Enter" || event.key === " ") open(layer, head, true);
    else if (event.key === "Escape") return tip();
    else if (event.key in moves) focusCell(...moves[event.key], true);
    else return;
    event.preventDefault();
  }

  function focusCell(layer, head, focus) {
    const next = cells.get(headName(layer, head));
    if (!next) return;
    cells.get(headName(current.layer, current.head)).tabIndex = -1;
    next.tabIndex = 0;
    current = { layer, head };
    if (focus) next.focus();
  }

  draw();
  return {
    node,
    draw,
    /** Mark the head that is open; the grid is entered there. */
    mark(layer, head) {
      for (const cell of table.querySelectorAll("[aria-selected]"))
        cell.removeAttribute("aria-selected");
      cells.get(headName(layer, head)).setAttribute("aria-selected", "true");
      focusCell(layer, head, false);
    },
    focus: () => focusCell(current.layer, current.head, true),
  };
}

/** The ramp with its ends in units, below a histogram of the heads along it. */
function legendParts(statistic) {
  const counts = new Array(LEGEND_BINS).fill(0);
  for (const value of statistic.values) {
    counts[Math.min(LEGEND_BINS - 1, Math.floor(statistic.share(value) * LEGEND_BINS))]++;
  }
  const most = Math.max(...counts);
  const bars = svg(
    "svg",
    {
      viewBox: `0 0 ${LEGEND_BINS} 1`,
      preserveAspectRatio: "none",
      class: "histogram",
      role: "img",
      "aria-label": "How many heads have each value",
    },
    counts.map((number, bin) =>
      svg("rect", { x: bin + 0.1, width: 0.8, height: number / most, y: 1 - number / most }),
    ),
  );
  const canvas = el("canvas", { class: "ramp", "aria-hidden": "true" });
  rampCanvas(canvas, "amount");
  const scale = statistic.log ? "log scale" : "";
  return [
    bars,
    canvas,
    el(
      "div",
      { class: "ends" },
      el("span", {}, statistic.write(statistic.low)),
      el("span", {}, scale),
      el("span", {}, statistic.write(statistic.high)),
    ),
  ];
}
