// Panel 2, "What does this head do?": the overview and the page of one head.

import { el, headLink, headName } from "./dom.js";
import { overview } from "./grid.js";
import { linkFigure } from "./links.js";
import { mapFigure } from "./map.js";
import { statisticsOf } from "./statistics.js";
import { queryStrips, receivedStrip, standing } from "./strips.js";
import { rankedTable } from "./table.js";

/** Builds the panel; `open(layer, head, byKey)` asks main.js to open a head. */
export function headsPanel(section, data, open) {
  const statistics = statisticsOf(data);
  const grid = overview(data, statistics, open);
  const page = headPage(data, statistics, grid);
  section.append(
    el("h2", { id: "heads-title" }, "What does this head do?"),
    el("div", { class: "workbench" }, grid.node, page.node),
    el("h3", {}, "Every head, ranked"),
    rankedTable(data, statistics),
  );
  return {
    show(layer, head) {
      grid.mark(layer, head);
      page.show(layer, head);
    },
    focus: page.focus,
    draw() {
      grid.draw();
      page.draw();
    },
  };
}

function headPage(data, statistics, grid) {
  const title = el("h3", { id: "head-title", tabindex: -1 });
  const group = el("p", { class: "group" });
  const neighbors = el("nav", { class: "neighbors", "aria-label": "Neighboring heads" });
  const strips = queryStrips(data);
  const map = mapFigure(data, (row) => strips.mark(row < 0 ? -1 : (row + 0.5) / data.bins));
  const received = receivedStrip(data);
  const links = linkFigure(data);
  const standings = statistics.map((statistic) => standing(data, statistic));
  const node = el(
    "article",
    {
      class: "head-page",
      "aria-labelledby": "head-title",
      on: {
        keydown: (event) => {
          if (event.key === "Escape") grid.focus();
        },
      },
    },
    el("header", { class: "bar-line" }, el("div", {}, title, group), neighbors),
    el("div", { class: "bar-line map-controls" }, map.controls),
    el(
      "div",
      { class: "figure" },
      map.nodes.labels,
      map.nodes.readout,
      map.nodes.queries,
      map.nodes.sinks,
      map.nodes.map,
      strips.node,
      map.nodes.keys,
      received.node,
    ),
    el("div", { class: "words" }, map.words),
    links.node,
    el(
      "section",
      {},
      el("h4", {}, "Where it stands among all heads"),
      el(
        "dl",
        { class: "standings" },
        standings.map((item) => item.node),
      ),
    ),
  );
  node.style.setProperty("--sinks", data.sinks.columns.length);

  return {
    node,
    draw: map.draw,
    focus() {
      title.focus({ preventScroll: true });
      const box = title.getBoundingClientRect();
      if (box.top < 0 || box.bottom > window.innerHeight * 0.6)
        node.scrollIntoView({ block: "start" });
    },
    show(layer, head) {
      title.textContent = `Layer ${layer}, head ${head}`;
      const shared = data.heads / data.kvHeads;
      group.textContent =
        shared > 1
          ? `${headName(layer, head)} reads KV head ${Math.floor(head / shared)} of ${data.kvHeads}, as ${shared - 1} other query heads do.`
          : headName(layer, head);
      neighbors.replaceChildren(
        ...[
          [layer, head - 1, "\u2190"],
          [layer, head + 1, "\u2192"],
          [layer - 1, head, "\u2191"],
          [layer + 1, head, "\u2193"],
        ]
          .filter(([to, at]) => to >= 0 && to < data.layers && at >= 0 && at < data.heads)
          .map(([to, at, arrow]) =>
            headLink(to, at, el("span", { "aria-hidden": "true" }, `${arrow} `), headName(to, at)),
          ),
      );
      for (const part of [map, strips, received, links, ...standings]) part.show(layer, head);
    },
  };
}
