// The ranked table of heads: every statistic as text, sorted by any column.

import { el, headLink } from "./dom.js";

/** The table; the largest value stands first until a heading is pressed. */
export function rankedTable(data, statistics) {
  let order = { name: statistics[0].name, descending: true };
  const body = el("tbody", {});
  const headings = statistics.map((item) => {
    const button = el(
      "button",
      {
        type: "button",
        title: item.meaning,
        on: {
          click: () => {
            const again = order.name === item.name;
            order = { name: item.name, descending: again ? !order.descending : true };
            draw();
          },
        },
      },
      item.label,
    );
    return el("th", { scope: "col", "data-name": item.name, class: "number" }, button);
  });
  const rows = data.allHeads().map(({ layer, head }) => {
    const rank = el("td", { class: "number rank" });
    return {
      layer,
      head,
      rank,
      node: el(
        "tr",
        {},
        rank,
        el("th", { scope: "row" }, headLink(layer, head)),
        statistics.map((item) =>
          el(
            "td",
            { class: "number", "data-name": item.name },
            item.write(data.statistic(item.name, layer, head)),
          ),
        ),
      ),
    };
  });

  function draw() {
    const key = ({ layer, head }) => {
      const value = data.statistic(order.name, layer, head);
      return Number.isFinite(value) ? value : -Infinity;
    };
    rows.sort((a, b) => (order.descending ? key(b) - key(a) : key(a) - key(b)));
    rows.forEach(({ rank }, index) => {
      rank.textContent = index + 1;
    });
    body.replaceChildren(...rows.map((row) => row.node));
    for (const heading of headings) {
      const sorted = heading.dataset.name === order.name;
      heading.setAttribute(
        "aria-sort",
        sorted ? (order.descending ? "descending" : "ascending") : "none",
      );
    }
  }

  draw();
  return el(
    "div",
    { class: "scroll ranked", tabindex: 0, role: "region", "aria-label": "Ranked table of heads" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col", class: "number" }, "#"),
          el("th", { scope: "col" }, "Head"),
          headings,
        ),
      ),
      body,
    ),
  );
}
