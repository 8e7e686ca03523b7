// Panel 1, "What does this token read?": all heads, grouped by the key that each ranks first,
// beside the one softmax of each layer's mean.

import { unpack } from "./data.js";
import { el, headLink, headName } from "./dom.js";
import { chip, count, percent, plural, readable } from "./format.js";

const FIRST_GROUPS = 20;
const BEFORE = 60;
const AFTER = 20;

export function tokenPanel(section, data) {
  const groups = groupHeads(data);
  const { index } = data.token;
  section.append(
    el("h2", { id: "reads-title" }, "What does this token read?"),
    el(
      "p",
      { class: "lead" },
      "Token ",
      count(index),
      ", ",
      chip(data.tokens[index], 40),
      ": ",
      `${plural(data.layers * data.heads, "head")} rank `,
      el("strong", {}, `${plural(groups.length, "different key")} first`),
      ".",
    ),
    context(data, groups),
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        {},
        el("h3", {}, "Every head, grouped by the key it ranks first"),
        groupList(data, groups),
      ),
      el(
        "div",
        {},
        el("h3", {}, "One softmax instead: the mean of each layer\u2019s heads"),
        meanTable(data),
      ),
    ),
  );
}

/** Groups of heads by first-ranked key, the largest first: {key, heads: [{layer, head, weight}]}. */
function groupHeads(data) {
  const groups = new Map();
  for (const { layer, head } of data.allHeads()) {
    const key = data.ofHead(data.token.keys, layer, head)[0];
    const weight = data.ofHead(data.token.weights, layer, head)[0];
    if (key < 0) continue; // this head's mask hides every key from the token
    if (!groups.has(key)) groups.set(key, { key, heads: [] });
    groups.get(key).heads.push({ layer, head, weight });
  }
  for (const group of groups.values()) group.heads.sort((a, b) => b.weight - a.weight);
  return [...groups.values()].sort(
    (a, b) => b.heads.length - a.heads.length || b.heads[0].weight - a.heads[0].weight,
  );
}

/** The text around the token; keys that some head ranks first are underlined by their number. */
function context(data, groups) {
  const { index } = data.token;
  const from = Math.max(0, index - BEFORE);
  const to = Math.min(data.length, index + AFTER);
  const heads = new Map(groups.map((group) => [group.key, group.heads.length]));
  const most = Math.max(...heads.values());
  const text = el("p", { class: "context" }, from ? "\u2026" : "");
  for (let at = from; at < to; at++) {
    const number = heads.get(at);
    const shown = readable(data.tokens[at]).replaceAll("\u23ce", "\u23ce\u200b"); // may break here
    if (at === index) {
      text.append(el("mark", { class: "chosen", title: `token ${at}, the one that reads` }, shown));
    } else if (number) {
      text.append(
        el(
          "span",
          {
            class: "read",
            title: `token ${at}: ranked first by ${plural(number, "head")}`,
            style: { "--much": Math.sqrt(number / most).toFixed(3) },
          },
          shown,
        ),
      );
    } else {
      text.append(shown);
    }
  }
  if (to < data.length) text.append("\u2026");
  return text;
}

function groupList(data, groups) {
  const most = groups[0].heads.length;
  const items = groups.map((group) => groupItem(data, group, most));
  // One stands open, to show that they open: the largest whose key is no sink.
  const sinks = new Set([0, ...data.sinks.columns]);
  const example = Math.max(
    0,
    groups.findIndex(({ key }) => !sinks.has(key)),
  );
  items[example].firstChild.open = true;
  const list = el("ol", { class: "groups" }, items);
  if (groups.length <= FIRST_GROUPS) return list;
  const rest = items.slice(FIRST_GROUPS);
  for (const item of rest) item.hidden = true;
  const more = el(
    "button",
    {
      class: "quiet",
      type: "button",
      on: {
        click: () => {
          for (const item of rest) item.hidden = false;
          rest[0].querySelector("summary").focus();
          more.remove();
        },
      },
    },
    `Show the other ${plural(rest.length, "key")}`,
  );
  return el("div", {}, list, more);
}

function groupItem(data, { key, heads }, most) {
  const best = heads[0];
  const summary = el(
    "summary",
    {},
    el("span", { class: "group-key" }, chip(data.tokens[key]), el("small", {}, ` ${count(key)}`)),
    el(
      "span",
      { class: "group-bar" },
      el("span", { class: "bar" }),
      el("span", {}, plural(heads.length, "head")),
    ),
    el(
      "span",
      { class: "group-best" },
      `${headName(best.layer, best.head)} `,
      el("b", {}, percent(best.weight)),
    ),
  );
  summary.querySelector(".bar").style.inlineSize = `${(100 * heads.length) / most}%`;
  const links = heads.map(({ layer, head, weight }) =>
    el("li", {}, headLink(layer, head), " ", percent(weight)),
  );
  return el("li", {}, el("details", {}, summary, el("ul", { class: "heads" }, links)));
}

function meanTable(data) {
  const ranks = data.token.meanKeys.shape[1];
  const keys = unpack(data.token.meanKeys);
  const weights = unpack(data.token.meanWeights);
  const rows = Array.from({ length: data.layers }, (_, layer) => {
    const key = keys[layer * ranks];
    const others = Array.from(
      { length: data.heads },
      (_, head) => data.ofHead(data.token.keys, layer, head)[0],
    ).filter((first) => first !== key).length;
    const bar = el("span", { class: "bar" });
    bar.style.inlineSize = `${100 * weights[layer * ranks]}%`;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, `L${layer}`),
      el(
        "td",
        { class: "mean-key" },
        chip(data.tokens[key], 12),
        el("small", {}, ` ${count(key)}`),
      ),
      el("td", { class: "mean-weight" }, bar, el("span", {}, percent(weights[layer * ranks]))),
      el("td", { class: others ? "number" : "number none" }, `${others} of ${data.heads}`),
    );
  });
  return el(
    "table",
    { class: "means" },
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "Layer"),
        el("th", { scope: "col" }, "The mean ranks first"),
        el("th", { scope: "col" }, "Its weight"),
        el("th", { scope: "col", class: "number" }, "Heads that rank another first"),
      ),
    ),
    el("tbody", {}, rows),
  );
}
