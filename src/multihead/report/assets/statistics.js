// What each statistic of a head is called, how it is written, and how it is put on a scale.

import { unpack } from "./data.js";
import { digits, percent } from "./format.js";

const tokens = (value) => `${digits(value)} tokens`;

/** In the order of the page's lists; only those that the inspection holds are offered. */
const KNOWN = [
  [
    "entropy_share",
    "Entropy share",
    percent,
    "linear",
    "Entropy over log(visible keys): 0 % reads one key, 100 % reads all alike",
  ],
  [
    "entropy",
    "Entropy",
    (value) => `${digits(value)} nats`,
    "linear",
    "Entropy of the softmax, mean over queries",
  ],
  ["max_weight", "Max weight", percent, "linear", "Largest weight of a query, mean over queries"],
  [
    "mean_distance",
    "Mean distance",
    tokens,
    "log",
    "Distance from a query to what it reads, weighted, mean over queries",
  ],
  [
    "sink_mass",
    "Sink mass",
    percent,
    "linear",
    "Share of the key mass on the row\u2019s first visible key",
  ],
  [
    "previous_token",
    "Previous token",
    percent,
    "linear",
    "Weight on the token just before, mean over queries",
  ],
  ["first_key", "First key", percent, "linear", "Weight on key 0, mean over queries"],
  [
    "participation",
    "Participation",
    (value) => `${digits(value)} keys`,
    "log",
    "1 / \u03a3p\u00b2: as many keys, read alike, would give the same sum of squares",
  ],
  [
    "max_logit",
    "Max logit",
    digits,
    "linear",
    "Largest logit over all queries and keys, after scale, softcap and bias",
  ],
  [
    "max_qk",
    "Max q\u00b7k",
    digits,
    "linear",
    "Largest scaled product of a query and a key, before softcap and bias",
  ],
];

/** The statistics of `data`: {name, label, write, meaning, values, low, high, log, share(value)}. */
export function statisticsOf(data) {
  return KNOWN.filter(([name]) => name in data.statistics).map(
    ([name, label, write, scale, meaning]) => {
      const values = Array.from(unpack(data.statistics[name])).filter(Number.isFinite);
      const low = Math.min(...values);
      const high = Math.max(...values);
      const log = scale === "log" && low > 0;
      const bend = log ? Math.log : (value) => value;
      const span = bend(high) - bend(low) || 1;
      return {
        name,
        label,
        write,
        meaning,
        low,
        high,
        values,
        log,
        share: (value) => (bend(value) - bend(low)) / span,
      };
    },
  );
}
