// Along the edges of the map: statistics per query beside its rows, received attention under its
// columns; and the place of one head among all.

import { binName, unpack } from "./data.js";
import { el, svg } from "./dom.js";
import { digits, percent } from "./format.js";

const STRIPS = [
  ["entropy", "entropy", (value) => `${digits(value)} nats`],
  ["max_weight", "max weight", percent],
  ["mean_distance", "mean distance", (value) => `${digits(value)} tokens`],
  ["sink_mass", "sink mass", percent],
];
const RECEIVED_FLOOR = 1e-5;

/** One strip per query statistic, queries downward as in the map. Returns {node, show, mark}. */
export function queryStrips(data) {
  const { edges } = data.strips;
  const bins = edges.length - 1;
  const strips = STRIPS.filter(([name]) => name in data.strips).map(([name, label, write]) => {
    // One scale for all heads, so that turning from head to head compares.
    const high =
      name.endsWith("weight") || name.endsWith("mass")
        ? 1
        : unpack(data.strips[name]).reduce((most, value) => (value > most ? value : most), 0) || 1;
    const area = svg("path", {});
    const line = svg("line", { x1: 0, x2: 1, class: "marker", visibility: "hidden" });
    const value = el("span", { class: "strip-value" });
    const drawing = svg(
      "svg",
      { viewBox: `0 0 1 ${bins}`, preserveAspectRatio: "none", role: "img" },
      area,
      line,
    );
    const node = el(
      "figure",
      { class: "strip", on: { pointermove: onPointer, pointerleave: () => mark(-1) } },
      el("figcaption", {}, label),
      drawing,
      value,
    );
    return { name, label, write, high, area, line, value, drawing, node };
  });
  let shown = null;

  function show(layer, head) {
    shown = strips.map((strip) => data.ofHead(data.strips[strip.name], layer, head));
    strips.forEach((strip, index) => {
      const values = shown[index];
      strip.area.setAttribute(
        "d",
        `M0 0${Array.from(
          values,
          (value, bin) => `H${((value || 0) / strip.high).toFixed(4)}V${bin + 1}`,
        ).join("")}H0Z`,
      );
      const known = Array.from(values).filter(Number.isFinite);
      strip.drawing.setAttribute(
        "aria-label",
        `${strip.label} per query: ${strip.write(Math.min(...known))} to ${strip.write(Math.max(...known))}`,
      );
    });
    mark(-1);
  }

  /** Show the values at `share` of the queries; -1 shows the scale's end instead. */
  function mark(share) {
    const bin = Math.min(bins - 1, Math.floor(share * bins));
    strips.forEach((strip, index) => {
      const on = share >= 0;
      strip.line.setAttribute("visibility", on ? "visible" : "hidden");
      strip.line.setAttribute("y1", bin + 0.5);
      strip.line.setAttribute("y2", bin + 0.5);
      strip.value.textContent = on
        ? strip.write(shown[index][bin])
        : `0\u2013${strip.write(strip.high)}`;
      strip.value.classList.toggle("on", on);
    });
  }

  function onPointer(event) {
    const box = event.currentTarget.querySelector("svg").getBoundingClientRect();
    mark(Math.min(1, Math.max(0, (event.clientY - box.top) / box.height)));
  }

  const node = el(
    "div",
    { class: "strips" },
    strips.map((strip) => strip.node),
    el("p", { class: "note" }, "Per query, from the first (top) to the last (bottom)."),
  );
  return { node, show, mark };
}

/** Bars under the map: the mean weight that each key receives, on a log scale. */
export function receivedStrip(data) {
  const { edges } = data.received;
  const bins = edges.length - 1;
  const area = svg("path", {});
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${bins} 1`, preserveAspectRatio: "none", role: "img" },
    area,
  );
  const value = el("figcaption", {});
  const node = el(
    "figure",
    { class: "received", on: { pointermove: onPointer, pointerleave: rest } },
    drawing,
    value,
  );
  let shown = null;

  function show(layer, head) {
    shown = data.ofHead(data.received.mean, layer, head);
    area.setAttribute(
      "d",
      `M0 1${Array.from(shown, (mean, bin) => {
        const height = mean > RECEIVED_FLOOR ? 1 - Math.log(mean) / Math.log(RECEIVED_FLOOR) : 0;
        return `V${(1 - height).toFixed(4)}H${bin + 1}`;
      }).join("")}V1Z`,
    );
    let top = 0;
    shown.forEach((mean, bin) => {
      if (mean > shown[top]) top = bin;
    });
    drawing.setAttribute(
      "aria-label",
      `Received attention per key, largest at keys ${binName(edges, top)}: ${percent(shown[top])}`,
    );
    rest();
  }

  function rest() {
    value.textContent =
      "received: mean weight from the queries that see the key, log scale, 0.001\u2013100 %";
  }

  function onPointer(event) {
    const box = drawing.getBoundingClientRect();
    const bin = Math.min(
      bins - 1,
      Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * bins)),
    );
    value.textContent = `keys ${binName(edges, bin)} receive ${percent(shown[bin])} each`;
  }

  return { node, show };
}

/** All heads as ticks along a statistic, one of them marked: {node, show(layer, head)}. */
export function standing(data, statistic) {
  const at = (value) => (100 * statistic.share(value)).toFixed(2);
  const ticks = svg("path", { d: statistic.values.map((value) => `M${at(value)} 3V13`).join("") });
  const marker = svg("line", { y1: 0, y2: 16, class: "marker" });
  const value = el("dd", {});
  const rank = el("dd", { class: "rank" });
  const node = el(
    "div",
    { class: "standing" },
    el("dt", { title: statistic.meaning }, statistic.label),
    el(
      "dd",
      { class: "ticks" },
      svg(
        "svg",
        { viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" },
        ticks,
        marker,
      ),
    ),
    value,
    rank,
  );

  function show(layer, head) {
    const own = data.statistic(statistic.name, layer, head);
    const known = Number.isFinite(own);
    marker.setAttribute("visibility", known ? "visible" : "hidden");
    if (known) {
      marker.setAttribute("x1", at(own));
      marker.setAttribute("x2", at(own));
    }
    value.textContent = statistic.write(own);
    rank.textContent = known
      ? `${1 + statistic.values.filter((other) => other > own).length} of ${statistic.values.length}`
      : "";
  }

  return { node, show };
}
