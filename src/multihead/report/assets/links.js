// Links between tokens: the strongest keys of one stored query row, each with its text, joined to
// the query by an arc as thick as its weight.

import { unpack } from "./data.js";
import { el, select, svg } from "./dom.js";
import { count, excerpt, percent, plural, quoted } from "./format.js";

const ROW = 40;
const GUTTER = 52;
const CONTEXT = 28;
const AROUND = 12;

/** The figure of links: {node, show(layer, head)}. */
export function linkFigure(data) {
  const { rows } = data.links;
  let chosen = Math.max(0, rows.indexOf(data.token.index));
  let head = null;
  const [label] = select(
    "Query",
    rows.map((row, at) => [String(at), `${count(row)}: ${quoted(data.tokens[row])}`]),
    String(chosen),
    (value) => {
      chosen = Number(value);
      draw();
    },
  );
  const arcs = svg("svg", { class: "arcs", width: GUTTER, "aria-hidden": "true" });
  const list = el("ol", { class: "link-rows" });
  const sum = el("p", { class: "note" });
  const node = el(
    "section",
    { class: "links" },
    el("div", { class: "bar-line" }, el("h4", {}, "The strongest links of one query"), label),
    el("div", { class: "link-box" }, arcs, list),
    sum,
  );

  function keysOf(row, layer, number) {
    const most = data.links.keys.shape[3];
    const start = ((row * data.layers + layer) * data.heads + number) * most;
    const weights = unpack(data.links.weights).subarray(start, start + most);
    return Array.from(unpack(data.links.keys).subarray(start, start + most), (key, at) => ({
      key,
      weight: weights[at],
    })).filter(({ key, weight }) => key >= 0 && weight > 0);
  }

  function draw() {
    const query = rows[chosen];
    const keys = keysOf(chosen, head.layer, head.number);
    const own = keys.find(({ key }) => key === query);
    const lines = keys.filter(({ key }) => key !== query);
    lines.push({ key: query, weight: own?.weight ?? null, query: true });
    lines.sort((a, b) => a.key - b.key);
    const most = Math.max(...keys.map(({ weight }) => weight));
    list.replaceChildren(...lines.map((line) => linkRow(data, line, line.weight === most)));
    drawArcs(lines);
    const total = keys.reduce((all, { weight }) => all + weight, 0);
    sum.textContent =
      `${keys.length === 1 ? "This key holds" : `These ${plural(keys.length, "key")} hold`} ` +
      `${percent(total)} of what the query reads with this head. A weight says what is read, not what is written.`;
  }

  function drawArcs(lines) {
    const y = (at) => (at + 0.5) * ROW;
    const from = lines.findIndex((line) => line.query);
    arcs.setAttribute("height", lines.length * ROW);
    arcs.replaceChildren(
      ...lines
        .map((line, at) => {
          if (line.weight === null) return null;
          const attributes = {
            "stroke-width": (1 + 9 * line.weight).toFixed(2),
            "stroke-opacity": (0.35 + 0.65 * line.weight).toFixed(2),
          };
          if (at === from) {
            const [top, bottom] = [y(at) - 6, y(at) + 6];
            return svg("path", {
              d: `M${GUTTER} ${top}C28 ${top - 12} 28 ${bottom + 12} ${GUTTER} ${bottom}`,
              ...attributes,
            });
          }
          const reach = GUTTER - Math.min(GUTTER - 6, 14 + 13 * Math.abs(at - from));
          return svg("path", {
            d: `M${GUTTER} ${y(from)}C${reach} ${y(from)} ${reach} ${y(at)} ${GUTTER} ${y(at)}`,
            ...attributes,
          });
        })
        .filter(Boolean),
    );
  }

  return {
    node,
    show(layer, number) {
      head = { layer, number };
      draw();
    },
  };
}

function linkRow(data, { key, weight, query }, strongest) {
  const kind = ["link-row", query ? "is-query" : "", strongest ? "is-strongest" : ""]
    .join(" ")
    .trim();
  return el(
    "li",
    { class: kind },
    el("span", { class: "number" }, count(key)),
    el(
      "span",
      { class: "link-text" },
      el("bdi", { class: "before" }, excerpt(data.tokens, key - AROUND, key, CONTEXT, true)),
      el(
        query ? "mark" : "b",
        { class: query ? "chosen" : "" },
        el("bdi", {}, quoted(data.tokens[key])),
      ),
      el("bdi", { class: "after" }, excerpt(data.tokens, key + 1, key + AROUND, 2 * CONTEXT)),
    ),
    el(
      "span",
      { class: "number" },
      weight === null ? "query" : query ? `itself ${percent(weight)}` : percent(weight),
    ),
  );
}
