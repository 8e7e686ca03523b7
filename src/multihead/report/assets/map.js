// The map of one head: pooled, on a logarithmic scale, with the sink keys in strips of their own.

import { at, rampCanvas } from "./color.js";
import { binName, binOf } from "./data.js";
import { el, select } from "./dom.js";
import { bits, chip, count, excerpt, percent } from "./format.js";

const FLOOR = 1e-4;
const LIFT_LIMIT = 6;
const STRONGEST = 6;
const TICKS = [0, 0.25, 0.5, 0.75, 1];

const POOLS = [
  ["mass", "mass: share of a query\u2019s weight"],
  ["peak", "peak: largest single weight"],
  ["lift", "lift: bits over a uniform head"],
];
const NOTES = {
  mass: "Mean over the queries of a row of the weight they give the keys of a column, sink keys left out.",
  peak: "The largest single weight in the cell, known within 3 % of itself; a column that holds a sink key includes it.",
  lift: "log2 of the mass over what a uniform head gives under the same mask, sink keys included; clipped at 6 bits.",
};

/** Where `value` lies on the scale of `pool`, 0 to 1. */
function shareOn(pool, value) {
  if (pool === "lift") return (value + LIFT_LIMIT) / (2 * LIFT_LIMIT);
  return value <= FLOOR ? 0 : 1 - Math.log10(value) / Math.log10(FLOOR);
}

/** The figure's parts; `onRow(bin or -1)` follows the pointer. {nodes, words, controls, show, draw}. */
export function mapFigure(data, onRow) {
  const { edges } = data.map;
  const columns = data.sinks.columns;
  const sinkBins = columns.map((column) => binOf(edges, column));
  let pool = "mass";
  let head = null;
  let cursor = { row: data.bins - 1, column: 0 };
  const [label] = select("Show", POOLS, pool, (value) => {
    pool = value;
    draw();
  });
  const canvas = el("canvas", {
    width: data.bins,
    height: data.bins,
    class: "map",
    tabindex: 0,
    role: "application",
    "aria-label": "Attention map; arrow keys move over its cells",
    "aria-describedby": "map-readout",
    on: { pointermove: onPointer, pointerleave: leave, keydown: onKey, blur: leave },
  });
  const cross = el("span", { class: "cross", hidden: true });
  const strips = columns.map((column, sink) =>
    el("canvas", {
      width: 1,
      height: data.bins,
      class: "sink",
      role: "img",
      on: { pointermove: (event) => onSink(event, sink), pointerleave: leave },
    }),
  );
  const said = el("span", {});
  const readout = el("p", { id: "map-readout", class: "readout", "aria-live": "polite" }, said);
  const note = el("p", { class: "note" });
  const remaining = el("p", { class: "remaining" });
  const strongest = el("ol", {});
  const ramp = el("canvas", { class: "ramp", "aria-hidden": "true" });
  const ends = el("div", { class: "ends" });

  const nodes = {
    readout,
    labels: el(
      "div",
      { class: "sink-labels" },
      columns.map((column) =>
        el(
          "span",
          { title: `sink: key ${column}` },
          chip(data.tokens[column], 8),
          ` ${count(column)}`,
        ),
      ),
    ),
    sinks: el("div", { class: "sinks" }, strips),
    map: el("div", { class: "map-box" }, canvas, cross),
    queries: axis(data.length, "queries"),
    keys: axis(data.length, "keys"),
  };
  const words = [
    remaining,
    note,
    el("details", {}, el("summary", {}, "The strongest cells in words"), strongest),
  ];

  function show(layer, number) {
    head = {
      rest: data.cells("rest", layer, number),
      peak: data.cells("peak", layer, number),
      sink: data.sinkStrips(layer, number),
    };
    draw();
  }

  function valueAt(name, row, column) {
    const rest = head.rest(row, column);
    if (name === "peak") return head.peak(row, column);
    if (name === "mass" || Number.isNaN(rest)) return rest;
    let mass = rest;
    sinkBins.forEach((bin, sink) => {
      if (bin === column) mass += head.sink(row, sink);
    });
    const lift = Math.log2(mass / data.uniform[row * data.bins + column]);
    return Math.min(LIFT_LIMIT, Math.max(-LIFT_LIMIT, lift));
  }

  function draw() {
    const kind = pool === "lift" ? "signed" : "amount";
    paint(
      canvas,
      data.bins,
      data.bins,
      (row, column) => valueAt(pool, row, column),
      (value) => at(kind, shareOn(pool, value)),
    );
    strips.forEach((strip, sink) => {
      paint(
        strip,
        data.bins,
        1,
        (row) => head.sink(row, sink),
        (value) => at("amount", shareOn("mass", value)),
      );
      strip.setAttribute(
        "aria-label",
        `Sink key ${columns[sink]}: mean weight ${percent(stripMean(sink))}`,
      );
    });
    rampCanvas(ramp, kind);
    ends.replaceChildren(
      ...(pool === "lift"
        ? ["\u22126 bits", "0", "+6 bits"]
        : ["\u2264 0.01 %", "0.1 %", "1 %", "10 %", "100 %"]
      ).map((text) => el("span", {}, text)),
    );
    note.textContent = NOTES[pool];
    describe();
    leave();
  }

  // Over queries: a bin counts by its width.
  function meanOverQueries(ofRow) {
    let sum = 0;
    for (let row = 0; row < data.bins; row++) sum += ofRow(row) * (edges[row + 1] - edges[row]);
    return sum / data.length;
  }

  function stripMean(sink) {
    return meanOverQueries((row) => head.sink(row, sink));
  }

  function describe() {
    const share = meanOverQueries((row) => {
      let sum = 0;
      for (let column = 0; column < data.bins; column++) sum += head.rest(row, column) || 0;
      return sum;
    });
    remaining.replaceChildren(
      ...(columns.length
        ? [
            "Without its sinks the map shows ",
            el("strong", {}, percent(share)),
            " of this head\u2019s mass",
            "; the sink keys, to the left, hold the rest.",
          ]
        : ["No key is a sink in any head (mean weight above 5 %): the map shows all of the mass."]),
    );
    const cells = [];
    for (let row = 0; row < data.bins; row++) {
      for (let column = 0; column < data.bins; column++) {
        const value = valueAt(pool, row, column);
        if (!Number.isNaN(value)) cells.push({ row, column, value });
      }
    }
    cells.sort((a, b) => b.value - a.value);
    strongest.replaceChildren(
      ...cells.slice(0, STRONGEST).map((cell) => el("li", {}, sentence(cell))),
    );
  }

  function written(name, value) {
    if (name === "lift") return bits(value);
    return value === 0 ? "< 0.0001 %" : percent(value); // what the packed arrays call 0
  }

  function sentence({ row, column, value }) {
    return `queries ${binName(edges, row)} on keys ${binName(edges, column)}: ${pool} ${written(pool, value)}`;
  }

  function binText(bin) {
    return el("bdi", { class: "quote" }, excerpt(data.tokens, edges[bin], edges[bin + 1], 28));
  }

  function read({ row, column }) {
    const mass = valueAt("mass", row, column);
    const what = Number.isNaN(mass)
      ? ["hidden by the mask"]
      : [
          el("b", {}, `mass ${written("mass", mass)}`),
          ...["peak", "lift"].map(
            (name) => `, ${name} ${written(name, valueAt(name, row, column))}`,
          ),
        ];
    said.replaceChildren(
      `Queries ${binName(edges, row)} `,
      binText(row),
      ` on keys ${binName(edges, column)} `,
      binText(column),
      ": ",
      ...what,
    );
    cross.hidden = false;
    cross.style.left = `${(100 * column) / data.bins}%`;
    cross.style.top = `${(100 * row) / data.bins}%`;
    cross.style.width = cross.style.height = `${100 / data.bins}%`;
    onRow(row);
  }

  function leave() {
    cross.hidden = true;
    said.textContent = "Point at a cell to read it.";
    onRow(-1);
  }

  function placeIn(event) {
    const box = event.target.getBoundingClientRect();
    const bin = (share) => Math.min(data.bins - 1, Math.max(0, Math.floor(share * data.bins)));
    return {
      row: bin((event.clientY - box.top) / box.height),
      column: bin((event.clientX - box.left) / box.width),
    };
  }

  function onPointer(event) {
    cursor = placeIn(event);
    read(cursor);
  }

  function onSink(event, sink) {
    const { row } = placeIn(event);
    const column = columns[sink];
    said.replaceChildren(
      `Queries ${binName(edges, row)} `,
      binText(row),
      ` on the sink, key ${count(column)} `,
      chip(data.tokens[column]),
      ": ",
      el("b", {}, `mass ${written("mass", head.sink(row, sink))}`),
    );
    onRow(row);
  }

  function onKey(event) {
    const step = event.shiftKey ? 8 : 1;
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[
      event.key
    ];
    if (!move) return;
    event.preventDefault();
    const inside = (value) => Math.min(data.bins - 1, Math.max(0, value));
    cursor = {
      row: inside(cursor.row + step * move[0]),
      column: inside(cursor.column + step * move[1]),
    };
    read(cursor);
  }

  return {
    nodes,
    words,
    controls: [label, el("div", { class: "legend" }, ramp, ends)],
    show,
    draw,
  };
}

function paint(canvas, rows, columns, value, color) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const shown = value(row, column);
      if (!Number.isNaN(shown))
        image.data.set([...color(shown), 255], 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
}

/** Positions along one side of the map. */
function axis(length, name) {
  return el(
    "div",
    { class: `axis ${name}` },
    el("span", { class: "axis-name" }, name === "queries" ? "query" : "key"),
    TICKS.map((share) => {
      const tick = el("span", { class: "tick" }, count(Math.round(share * length)));
      tick.style.setProperty("--at", `${100 * share}%`);
      return tick;
    }),
  );
}
