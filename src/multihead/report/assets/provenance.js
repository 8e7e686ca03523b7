// The header and panel 3: what was run, on what, at what cost, and what one text can say.

import { el } from "./dom.js";
import { bytes, count, plural, seconds, short } from "./format.js";

const small = (value) => (value === null ? "not measured" : value.toExponential(1));

const FACTS = [
  ["model", "Model"],
  ["file", "File"],
  ["quantization", "Quantization"],
  ["dtype", "Computed in"],
  ["backend", "Attention backend"],
  ["instruction_set", "Instruction set"],
  ["processor", "Processor"],
  ["threads", "Threads"],
  ["text", "Text"],
  ["tokens", "Tokens", count],
  ["start_token", "Start token"],
  ["chat_template", "Chat template"],
  ["seconds", "Time of the inspection", seconds],
  ["forward_seconds", "of which the forward pass", seconds],
  ["peak_rss_bytes", "Peak resident memory", bytes],
  ["versions", "Versions"],
];

const COSTS = [
  [
    "Parameters",
    count,
    [
      ["parameters_embeddings", "embeddings"],
      ["parameters_attention", "attention"],
      ["parameters_feed_forward", "feed-forward"],
      ["parameters_norms", "norms"],
      ["parameters_head", "output head"],
      ["parameters_total", "all"],
    ],
  ],
  [
    "Products (multiply-adds)",
    count,
    [
      ["products_projections", "projections"],
      ["products_scores", "scores q\u00b7k"],
      ["products_values", "weights \u00d7 values"],
      ["products_feed_forward", "feed-forward"],
      ["products_head", "output head"],
      ["products_total", "all"],
      ["exponentials", "exponentials"],
    ],
  ],
  [
    "Memory",
    bytes,
    [
      ["kv_cache_bytes", "KV cache"],
      ["score_table_bytes_head", "N \u00d7 N of one head, not built"],
      ["score_table_bytes_layer", "N \u00d7 N of one layer, not built"],
      ["score_table_bytes_model", "N \u00d7 N of all heads, not built"],
    ],
  ],
];

export function header(node, data) {
  const { provenance: made, cost } = data;
  const heads = data.layers * data.heads;
  const figures = [
    [
      plural(heads, "head"),
      `${data.layers} layers \u00d7 ${data.heads}, ${data.kvHeads} KV heads a layer`,
    ],
    [plural(data.length, "token"), `one text: ${made.text ?? "given"}`],
    ...("context" in cost
      ? [
          [short(cost.parameters_total), "parameters"],
          [short(cost.products_total), "products (multiply-adds)"],
          [bytes(cost.kv_cache_bytes), `KV cache in ${cost.dtype}`],
          [bytes(cost.score_table_bytes_model), "of N \u00d7 N weights, not built"],
        ]
      : []),
  ];
  node.append(
    el("p", { class: "eyebrow" }, "multihead inspect"),
    el("h1", {}, el("bdi", {}, String(made.model ?? "a model"))),
    el(
      "dl",
      { class: "figures" },
      figures.map(([value, name]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
    el(
      "p",
      { class: "caution" },
      el("strong", {}, "One text."),
      " What follows is what these heads read in this text; another text may show another picture. ",
      "Reading is not writing: a weight says where a head looks, not how much it matters.",
    ),
  );
}

export function provenancePanel(section, data) {
  section.append(
    el("h2", { id: "made-title" }, "How was this made?"),
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        {},
        el("h3", {}, "The run"),
        el("dl", { class: "facts" }, facts(data.provenance), exactness(data.provenance)),
      ),
      el("div", {}, el("h3", {}, "What it costs"), costs(data.cost)),
    ),
    el("h3", {}, "How exact is this page?"),
    precision(data),
  );
}

function facts(made) {
  return FACTS.filter(([name]) => made[name] !== null && made[name] !== undefined).map(
    ([name, label, write = String]) => fact(label, write(made[name])),
  );
}

function fact(label, ...value) {
  return el("div", {}, el("dt", {}, label), el("dd", {}, el("bdi", {}, value)));
}

function exactness(made) {
  if (made.dense_error_max === null || made.dense_error_max === undefined) return [];
  return [
    fact(
      "Largest error against dense float64",
      `${small(made.dense_error_max)} on ${plural(made.dense_error_rows, "sampled row")}; ` +
        `torch\u2019s own attention on the same rows: ${small(made.dense_error_baseline ?? null)}`,
    ),
  ];
}

function costs(cost) {
  if (!("context" in cost)) {
    return el(
      "p",
      { class: "note" },
      "The arithmetic of a plain decoder does not cover this model.",
    );
  }
  return COSTS.map(([title, write, rows]) =>
    el(
      "table",
      { class: "costs" },
      el("caption", {}, title),
      el(
        "tbody",
        {},
        rows
          .filter(([name]) => name in cost)
          .map(([name, label]) =>
            el(
              "tr",
              { class: name.endsWith("_total") ? "total" : "" },
              el("th", { scope: "row" }, label),
              el("td", { class: "number" }, write(cost[name])),
            ),
          ),
      ),
    ),
  );
}

function precision(data) {
  const share = (packed) => `${(100 * packed.error).toPrecision(2)} %`;
  const rows = [
    ["Statistics of heads, and what the token reads", "float32, as computed"],
    [
      "Mass and sink strips",
      `within ${share(data.map.rest)} of the value; below 0.0001 % shown as 0`,
    ],
    ["Peak", `within ${share(data.map.peak)} of the value; below 0.0001 % shown as 0`],
    ["Received attention, links", `within ${share(data.links.weights)} of the value`],
    [
      "Entropy, distance and weight per query",
      "within 1 / 130,000 of the largest value of any head",
    ],
  ];
  return el(
    "dl",
    { class: "facts" },
    rows.map(([label, value]) => fact(label, value)),
    fact(
      "Maps and strips",
      `${plural(data.bins, "bin")} a side; a cell is a mean over its queries, never a sample`,
    ),
  );
}
