// Draw the roofline of the machine with the predicted and the measured step.

import { draw, make, quantity, seconds, significant, table } from './dom.js';

const LEFT = 92, RIGHT = 16, TOP = 18, BOTTOM = 52;
const LEAST_WIDTH = 260, ASPECT = 0.55, LEAST_HEIGHT = 260, LABEL_WIDTH = 56;  // in pixels
const NONE = '–';  // stands for a missing figure
const MARGIN = 8;  // factor by which the axes extend beyond the points

export class Roofline {
  constructor(node) {
    this.node = node;
    this.trail = [];
    this.width = 0;
    new ResizeObserver(() => this.last && this.#width() !== this.width && this.show(...this.last)).observe(node);
  }

  // One unit of the drawing is one pixel, so that its text has the size of the page's text.
  #width() {
    return Math.max(LEAST_WIDTH, this.node.clientWidth);
  }

  // step: {tokens, sequences, bytes, flops, measured_s, predicted_s (null: not calibrated)}; roof: {bytes_per_s, flops_per_s}
  show(roof, step) {
    this.last = [roof, step];
    this.width = this.#width();
    if (!roof) {
      this.node.replaceChildren(make('p', { class: 'help' }, 'The roofline of this machine is unknown.'));
      return;
    }
    const times = step ? [step.measured_s, ...(step.predicted_s ? [step.predicted_s] : [])] : [];
    const points = times.map((time) => point(step, time));
    if (step) this.trail = [...this.trail.filter(([x, y]) => x !== points[0][0] || y !== points[0][1]), points[0]].slice(-40);
    const scale = scales(this.width, roof, [...points, ...this.trail]);
    this.node.replaceChildren(
      this.#chart(roof, points, scale),
      make('ul', { class: 'legend' },
        key('roof', 'roofline'), key('measured', 'measured step'), points.length > 1 ? key('predicted', 'predicted step') : ''),
      step ? numbers(roof, step) : make('p', { class: 'help' }, 'No step has run yet. Generate something in the playground.'));
  }

  #chart(roof, points, { x, y, width, height, ranges: [[x0, x1], [y0, y1]] }) {
    const ridge = roof.flops_per_s / roof.bytes_per_s, bottom = height - BOTTOM, right = width - RIGHT;
    const line = `M${x(x0)} ${y(x0 * roof.bytes_per_s)}L${x(ridge)} ${y(roof.flops_per_s)}L${x(x1)} ${y(roof.flops_per_s)}`;
    const start = 1.6 * x0;  // position of the slope's label, away from the points
    const [low, high] = [start, 2 * start].map((at) => [x(at), y(at * roof.bytes_per_s)]);
    const slope = (180 / Math.PI) * Math.atan2(high[1] - low[1], high[0] - low[0]);
    const [measured, predicted] = points;
    return draw('svg', { class: 'chart', viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': 'Operations per second over operations per byte; the table below has the numbers' },
      draw('path', { class: 'under', d: `${line}V${bottom}H${x(x0)}Z` }),
      decades(x0, x1, (right - LEFT) / LABEL_WIDTH).flatMap((value) => [
        draw('line', { class: 'grid', x1: x(value), x2: x(value), y1: TOP, y2: bottom }),
        draw('text', { x: x(value), y: bottom + 18, 'text-anchor': 'middle' }, significant(value))]),
      decades(y0, y1, (bottom - TOP) / 20).flatMap((value) => [
        draw('line', { class: 'grid', x1: LEFT, x2: right, y1: y(value), y2: y(value) }),
        draw('text', { x: LEFT - 8, y: y(value) + 4, 'text-anchor': 'end' }, quantity(value, 'FLOP/s'))]),
      draw('text', { x: (LEFT + right) / 2, y: height - 8, 'text-anchor': 'middle' }, 'operations per byte'),
      draw('path', { class: 'roof', d: line }),
      draw('text', { class: 'label', x: low[0], y: low[1] - 8, transform: `rotate(${slope} ${low})` },
        quantity(roof.bytes_per_s, 'B/s')),
      draw('text', { class: 'label', x: right - 6, y: y(roof.flops_per_s) - 10, 'text-anchor': 'end' },
        quantity(roof.flops_per_s, 'FLOP/s')),
      this.trail.map(([a, b]) => draw('circle', { class: 'trail', cx: x(a), cy: y(b), r: 4 })),
      measured && draw('line', { class: 'drop', x1: x(measured[0]), x2: x(measured[0]), y1: y(measured[1]),
        y2: y(Math.min(measured[0] * roof.bytes_per_s, roof.flops_per_s)) }),
      predicted && draw('circle', { class: 'predicted', cx: x(predicted[0]), cy: y(predicted[1]), r: 9 }),
      measured && draw('circle', { class: 'measured', cx: x(measured[0]), cy: y(measured[1]), r: 7 }));
  }
}

const point = (step, time) => [step.flops / step.bytes, step.flops / time];

function scales(width, roof, points) {
  const height = Math.round(Math.max(LEAST_HEIGHT, ASPECT * width));
  const xs = [roof.flops_per_s / roof.bytes_per_s, ...points.map(([x]) => x)];
  const ranges = [span(xs), span([roof.flops_per_s, ...points.map(([, y]) => y)])];
  const [[x0, x1], [y0, y1]] = ranges, at = (value, low, high) => Math.log(value / low) / Math.log(high / low);
  return {
    width, height, ranges,
    x: (value) => LEFT + at(value, x0, x1) * (width - LEFT - RIGHT),
    y: (value) => height - BOTTOM - at(Math.max(value, y0), y0, y1) * (height - BOTTOM - TOP),
  };
}

const span = (values) => [Math.min(...values) / MARGIN, Math.max(...values) * Math.sqrt(MARGIN)];

// The powers of ten between two values, or every second or third of them, so that there are not more than `most`.
function decades(low, high, most) {
  const first = Math.ceil(Math.log10(low)), count = Math.floor(Math.log10(high)) - first + 1;
  const every = Math.max(1, Math.ceil(count / Math.max(1, most)));
  return Array.from({ length: Math.max(0, Math.ceil(count / every)) }, (_, i) => 10 ** (first + i * every));
}

function key(name, text) {
  const shape = name === 'roof' ? draw('path', { class: 'roof', d: 'M1 14L8 4H15' }) : draw('circle', { class: name, cx: 8, cy: 8, r: 6 });
  return make('li', {}, draw('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true' }, shape), text);
}

function numbers(roof, step) {
  const least = Math.max(step.bytes / roof.bytes_per_s, step.flops / roof.flops_per_s);
  const times = [step.measured_s, step.predicted_s], each = (show) => times.map((time) => (time ? show(time) : NONE));
  const found = table('The last step', ['the last step', 'measured', 'predicted'], [
    ['time of the step', ...each(seconds)],
    ['operations', ...each((time) => quantity(step.flops / time, 'FLOP/s'))],
    ['memory', ...each((time) => quantity(step.bytes / time, 'B/s'))],
    ['share of the peak', ...each((time) => `${significant(100 * least / time)} %`)],
    ['tokens in the step', step.tokens, ''],
    ['operations per byte', significant(step.flops / step.bytes), ''],
  ]);
  if (step.predicted_s) return found;
  const remedy = 'There is no prediction, since this machine is not calibrated. Run `ridgeline calibrate`, then restart the server.';
  return make('div', {}, found, make('p', { class: 'help' }, remedy));
}
