// The inspection as the page reads it. Arrays are unpacked on first use; the rules are those of
// multihead/report/pack.py.

const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };

/** The values of a packed array, flat, as numbers; its `shape` stays with the packed array. */
export function unpack(packed) {
  packed.values ??= decode(packed, elements(packed));
  return packed.values;
}

function elements({ data, type }) {
  const text = atob(data);
  const raw = Uint8Array.from({ length: text.length }, (_, index) => text.charCodeAt(index));
  return new TYPES[type](raw.buffer);
}

function decode({ rule, type, low, step }, codes) {
  if (rule === "raw") return codes;
  const size = type === "u1" ? 256 : 65536;
  const table = Float32Array.from({ length: size }, (_, code) =>
    rule === "linear" ? low + step * code : code && low * 2 ** (step * (code - 1)),
  );
  table[size - 1] = NaN;
  return Float32Array.from(codes, (code) => table[code]);
}

/** Read the page's data block and give it the accessors that the panels share. */
export function load() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const uniform = unpack(data.map.uniform);
  const bins = data.map.uniform.shape[0];
  const cellOf = new Int32Array(bins * bins).fill(-1);
  let visible = 0;
  uniform.forEach((value, cell) => {
    if (!Number.isNaN(value)) cellOf[cell] = visible++;
  });
  const index = (layer, head) => layer * data.heads + head;
  return {
    ...data,
    length: data.tokens.length,
    bins,
    uniform,

    /** The innermost row of an array [L, H, ...rest] that belongs to one head. */
    ofHead(packed, layer, head) {
      const values = unpack(packed);
      const size = values.length / (data.layers * data.heads);
      return values.subarray(index(layer, head) * size, (index(layer, head) + 1) * size);
    },

    /** One statistic of one head. */
    statistic(name, layer, head) {
      return unpack(data.statistics[name])[index(layer, head)];
    },

    /** A head's map as a function of (row bin, column bin); hidden cells are NaN. */
    cells(name, layer, head) {
      const values = this.ofHead(data.map[name], layer, head);
      return (row, column) => {
        const cell = cellOf[row * bins + column];
        return cell < 0 ? NaN : values[cell];
      };
    },

    /** What each sink key takes of each row bin: a function of (row bin, sink). */
    sinkStrips(layer, head) {
      const sinks = data.sinks.columns.length;
      const values = this.ofHead(data.sinks.strips, layer, head);
      return (row, sink) => values[row * sinks + sink];
    },

    /** All heads as {layer, head}, in order. */
    allHeads() {
      return Array.from({ length: data.layers * data.heads }, (_, at) => ({
        layer: Math.floor(at / data.heads),
        head: at % data.heads,
      }));
    },
  };
}

/** The bin of `edges` in which `position` lies. */
export function binOf(edges, position) {
  let bin = edges.length - 2;
  while (bin > 0 && edges[bin] > position) bin--;
  return bin;
}

/** "512–543", or "512" for a bin of one position. */
export function binName(edges, bin) {
  const [first, last] = [edges[bin], edges[bin + 1] - 1];
  return first === last ? `${first}` : `${first}\u2013${last}`;
}
