// Numbers and tokens as people read them.

import { el } from "./dom.js";

const NO_VALUE = "not defined";
const PLACES = new Intl.NumberFormat("en-US");
const PREFIXES = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** 2048 -> 2,048. */
export function count(value) {
  return PLACES.format(value);
}

/** Three digits that mean something: 0.0123, 1.23, 123. */
export function digits(value) {
  if (!Number.isFinite(value)) return NO_VALUE;
  const size = Math.abs(value);
  if (size >= 100) return count(Math.round(value));
  if (size >= 10) return value.toFixed(1);
  return size >= 0.1 || size === 0 ? value.toFixed(2) : value.toPrecision(2);
}

/** A share of 1 in per cent. */
export function percent(value) {
  if (!Number.isFinite(value)) return NO_VALUE;
  const hundredths = value * 100;
  if (hundredths >= 99.995) return value < 1 ? "> 99.99 %" : "100 %";
  if (hundredths >= 99) return `${hundredths.toFixed(2)} %`;
  if (hundredths >= 10) return `${hundredths.toFixed(0)} %`;
  if (hundredths >= 1) return `${hundredths.toFixed(1)} %`;
  if (hundredths >= 0.01) return `${hundredths.toFixed(2)} %`;
  return hundredths > 0 ? "< 0.01 %" : "0 %";
}

/** A signed number of bits. */
export function bits(value) {
  if (!Number.isFinite(value)) return NO_VALUE;
  return `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(1)} bits`;
}

/** 134515008 -> 134.5 M. */
export function short(value) {
  const [size, prefix] = PREFIXES.find(([limit]) => value >= limit) ?? [1, ""];
  return prefix ? `${(value / size).toFixed(value / size >= 100 ? 0 : 1)} ${prefix}` : count(value);
}

/** Decimal units, as disks and memory bandwidth are sold. */
export function bytes(value) {
  return value >= 1e3 ? `${short(value)}B` : `${value} B`;
}

export function seconds(value) {
  return value === null ? NO_VALUE : `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} s`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A token in running text: blanks kept, line breaks and control characters made visible. */
export function readable(token) {
  return token
    .replace(/\r?\n/g, "\u23ce")
    .replace(/\t/g, "\u21e5")
    .replace(/[\u0000-\u001f\u007f]/g, "\ufffd");
}

/** A token that stands alone: outer blanks drawn, long ones shortened. */
export function quoted(token, limit = 18) {
  const text = readable(token).replace(/^ +| +$/g, (blanks) => "\u2423".repeat(blanks.length));
  const letters = Array.from(text);
  if (!letters.length) return "\u2205";
  return letters.length > limit ? `${letters.slice(0, limit - 1).join("")}\u2026` : text;
}

/** A token as an element of its own, isolated from the direction of the text around it. */
export function chip(token, limit) {
  return el("bdi", { class: "token" }, quoted(token, limit));
}

/** The text of tokens[from, to), at most `limit` letters, cut at the end or at the start. */
export function excerpt(tokens, from, to, limit, cutStart = false) {
  const wanted = tokens.slice(Math.max(0, from), Math.min(tokens.length, to));
  const letters = Array.from(readable(wanted.join("")));
  if (letters.length <= limit) return letters.join("");
  const kept = cutStart ? letters.slice(-limit) : letters.slice(0, limit);
  return cutStart ? `\u2026${kept.join("")}` : `${kept.join("")}\u2026`;
}
