// The page: builds the panels, keeps the open head and the address in step.

import { onScheme } from "./color.js";
import { load } from "./data.js";
import { headName } from "./dom.js";
import { headsPanel } from "./head.js";
import { header, provenancePanel } from "./provenance.js";
import { tokenPanel } from "./token.js";

const data = load();
header(document.getElementById("top"), data);
tokenPanel(document.getElementById("reads"), data);
const heads = headsPanel(document.getElementById("heads"), data, openHead);
provenancePanel(document.getElementById("made"), data);

/** Open a head, put it in the address, and take the reader there. */
function openHead(layer, head) {
  heads.show(layer, head);
  const hash = `#${headName(layer, head)}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  heads.focus();
}

/** The head that `hash` names, or null. */
function headIn(hash) {
  const match = /^#L(\d+)H(\d+)$/.exec(hash);
  if (!match) return null;
  const [layer, head] = [Number(match[1]), Number(match[2])];
  return layer < data.layers && head < data.heads ? { layer, head } : null;
}

/** The head in which the token reads most from a key that is neither a sink nor its neighbor. */
function sharpest() {
  const { index } = data.token;
  const plain = new Set([0, index - 1, index, ...data.sinks.columns]);
  let best = { layer: 0, head: 0, weight: -1 };
  for (const { layer, head } of data.allHeads()) {
    const weight = data.ofHead(data.token.weights, layer, head)[0];
    const key = data.ofHead(data.token.keys, layer, head)[0];
    if (!plain.has(key) && weight > best.weight) best = { layer, head, weight };
  }
  return best;
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.head-link");
  const named = link && !event.ctrlKey && !event.metaKey && !event.shiftKey && headIn(link.hash);
  if (!named) return;
  event.preventDefault();
  openHead(named.layer, named.head);
});
window.addEventListener("popstate", () => {
  const named = headIn(location.hash) ?? first;
  heads.show(named.layer, named.head);
});
onScheme(() => heads.draw());

const linked = headIn(location.hash);
const first = linked ?? sharpest();
heads.show(first.layer, first.head);
if (linked) heads.focus();
