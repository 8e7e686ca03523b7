// Colors that keep their order without hue: every ramp is monotone in lightness (mako, after
// seaborn, for amounts; orange to blue for signs), mixed in OKLab, and turned over in the dark so
// that "little" is always the color of the page.

const MAKO = [
  "#0f0a12",
  "#2b1c35",
  "#403a75",
  "#37659e",
  "#348fa7",
  "#40b7ad",
  "#8ad9b1",
  "#def5e5",
];
const SIGNED_LIGHT = ["#7f3b08", "#c9701a", "#f0b878", "#f4f3f0", "#9cc0e0", "#3c7fbf", "#12386e"];
const SIGNED_DARK = ["#ffc98f", "#d9832f", "#7a4313", "#1b2025", "#1d4a78", "#4a93d6", "#b5daff"];
const STEPS = 256;

const dark = window.matchMedia("(prefers-color-scheme: dark)");
let printing = false;

/** Call `redraw` whenever the page's colors change: another scheme, or paper. */
export function onScheme(redraw) {
  dark.addEventListener("change", redraw);
  for (const [event, state] of [
    ["beforeprint", true],
    ["afterprint", false],
  ]) {
    window.addEventListener(event, () => {
      printing = state;
      redraw();
    });
  }
}

/** The current ramp, "amount" or "signed": STEPS colors of [red, green, blue], 0 to 255. */
function ramp(kind) {
  const night = dark.matches && !printing;
  const stops =
    kind === "signed" ? (night ? SIGNED_DARK : SIGNED_LIGHT) : night ? MAKO : MAKO.toReversed();
  return cached(stops.join(), stops);
}

/** The CSS color at `share` (0 to 1) of the current ramp. */
export function colorAt(kind, share) {
  return `rgb(${at(kind, share).join(" ")})`;
}

/** The three bytes at `share` (0 to 1) of the current ramp. */
export function at(kind, share) {
  return ramp(kind)[Math.round(Math.min(1, Math.max(0, share)) * (STEPS - 1))];
}

/** A canvas that shows the whole ramp from left to right. */
export function rampCanvas(canvas, kind) {
  canvas.width = STEPS;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(STEPS, 1);
  ramp(kind).forEach((color, index) => image.data.set([...color, 255], 4 * index));
  context.putImageData(image, 0, 0);
}

const ramps = new Map();

function cached(key, stops) {
  if (!ramps.has(key)) {
    const labs = stops.map(toLab);
    ramps.set(
      key,
      Array.from({ length: STEPS }, (_, index) => {
        const place = (index / (STEPS - 1)) * (labs.length - 1);
        const left = Math.min(Math.floor(place), labs.length - 2);
        return fromLab(
          labs[left].map((value, axis) => value + (place - left) * (labs[left + 1][axis] - value)),
        );
      }),
    );
  }
  return ramps.get(key);
}

// OKLab: Bjorn Ottosson, "A perceptual color space for image processing", 2020.
function toLab(hex) {
  const [r, g, b] = [1, 3, 5].map((start) => {
    const value = parseInt(hex.slice(start, start + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromLab([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => {
    const clear = Math.min(1, Math.max(0, value));
    const coded = clear <= 0.0031308 ? 12.92 * clear : 1.055 * clear ** (1 / 2.4) - 0.055;
    return Math.round(255 * coded);
  });
}
