// The roofline of the machine, and where steps are beneath it: predicted and measured.

import { draw, make, quantity, seconds, significant, table } from './dom.js';

const WIDTH = 720, HEIGHT = 400, LEFT = 92, RIGHT = 16, TOP = 18, BOTTOM = 52;
const MARGIN = 8;  // of the axes, as a factor beyond what they show

export class Roofline {
  constructor(node) {
    this.node = node;
    this.trail = [];
  }

  // step: {tokens, sequences, bytes, flops, measured_s, predicted_s}; roof: {bytes_per_s, flops_per_s}
  show(roof, step) {
    if (!roof) {
      this.node.replaceChildren(make('p', { class: 'help' }, 'The roofline of this machine is not known.'));
      return;
    }
    const points = step ? [point(step, step.measured_s), point(step, step.predicted_s)] : [];
    if (step) this.trail = [...this.trail.filter(([x, y]) => x !== points[0][0] || y !== points[0][1]), points[0]].slice(-40);
    const scale = scales(roof, [...points, ...this.trail]);
    this.node.replaceChildren(
      this.#chart(roof, points, scale),
      make('ul', { class: 'legend' },
        key('roof', 'the roof'), key('measured', 'measured step'), key('predicted', 'predicted step')),
      step ? numbers(roof, step) : make('p', { class: 'help' }, 'No step has run yet. Ask for something in the playground.'));
  }

  #chart(roof, points, { x, y, ranges: [[x0, x1], [y0, y1]] }) {
    const ridge = roof.flops_per_s / roof.bytes_per_s, bottom = HEIGHT - BOTTOM;
    const line = `M${x(x0)} ${y(x0 * roof.bytes_per_s)}L${x(ridge)} ${y(roof.flops_per_s)}L${x(x1)} ${y(roof.flops_per_s)}`;
    const middle = Math.sqrt(x0 * ridge);  // of the slope
    const [low, high] = [middle, 2 * middle].map((at) => [x(at), y(at * roof.bytes_per_s)]);
    const slope = (180 / Math.PI) * Math.atan2(high[1] - low[1], high[0] - low[0]);
    const [measured, predicted] = points;
    return draw('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img',
      'aria-label': 'Operations per second over operations per byte; the table below has the numbers' },
      draw('path', { class: 'under', d: `${line}V${bottom}H${x(x0)}Z` }),
      decades(x0, x1).flatMap((value) => [
        draw('line', { class: 'grid', x1: x(value), x2: x(value), y1: TOP, y2: bottom }),
        draw('text', { x: x(value), y: bottom + 18, 'text-anchor': 'middle' }, significant(value))]),
      decades(y0, y1).flatMap((value) => [
        draw('line', { class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        draw('text', { x: LEFT - 8, y: y(value) + 4, 'text-anchor': 'end' }, quantity(value, 'FLOP/s'))]),
      draw('text', { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, 'text-anchor': 'middle' }, 'operations per byte'),
      draw('path', { class: 'roof', d: line }),
      draw('text', { class: 'label', x: low[0], y: low[1] - 10, 'text-anchor': 'middle', transform: `rotate(${slope} ${low})` },
        quantity(roof.bytes_per_s, 'B/s')),
      draw('text', { class: 'label', x: WIDTH - RIGHT - 6, y: y(roof.flops_per_s) - 10, 'text-anchor': 'end' },
        quantity(roof.flops_per_s, 'FLOP/s')),
      this.trail.map(([a, b]) => draw('circle', { class: 'trail', cx: x(a), cy: y(b), r: 4 })),
      measured && draw('line', { class: 'drop', x1: x(measured[0]), x2: x(measured[0]), y1: y(measured[1]),
        y2: y(Math.min(measured[0] * roof.bytes_per_s, roof.flops_per_s)) }),
      predicted && draw('circle', { class: 'predicted', cx: x(predicted[0]), cy: y(predicted[1]), r: 9 }),
      measured && draw('circle', { class: 'measured', cx: x(measured[0]), cy: y(measured[1]), r: 7 }));
  }
}

const point = (step, time) => [step.flops / step.bytes, step.flops / time];

function scales(roof, points) {
  const xs = [roof.flops_per_s / roof.bytes_per_s, ...points.map(([x]) => x)];
  const ranges = [span(xs), span([roof.flops_per_s, ...points.map(([, y]) => y)])];
  const [[x0, x1], [y0, y1]] = ranges, at = (value, low, high) => Math.log(value / low) / Math.log(high / low);
  return {
    ranges,
    x: (value) => LEFT + at(value, x0, x1) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - at(Math.max(value, y0), y0, y1) * (HEIGHT - BOTTOM - TOP),
  };
}

const span = (values) => [Math.min(...values) / MARGIN, Math.max(...values) * Math.sqrt(MARGIN)];

function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power += 1) found.push(10 ** power);
  return found;
}

function key(name, text) {
  const shape = name === 'roof' ? draw('path', { class: 'roof', d: 'M1 14L8 4H15' }) : draw('circle', { class: name, cx: 8, cy: 8, r: 6 });
  return make('li', {}, draw('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true' }, shape), text);
}

function numbers(roof, step) {
  const floor = Math.max(step.bytes / roof.bytes_per_s, step.flops / roof.flops_per_s);
  return table('The last step', ['', 'measured', 'predicted'], [
    ['time of the step', seconds(step.measured_s), seconds(step.predicted_s)],
    ['operations', quantity(step.flops / step.measured_s, 'FLOP/s'), quantity(step.flops / step.predicted_s, 'FLOP/s')],
    ['memory', quantity(step.bytes / step.measured_s, 'B/s'), quantity(step.bytes / step.predicted_s, 'B/s')],
    ['of the roof', `${significant(100 * floor / step.measured_s)} %`, `${significant(100 * floor / step.predicted_s)} %`],
    ['tokens in it', step.tokens, ''],
    ['operations per byte', significant(step.flops / step.bytes), ''],
  ]);
}
