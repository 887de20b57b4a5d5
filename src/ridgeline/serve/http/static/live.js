// Show the live figures of the server, requested once a second while the page is visible.

import { ask } from './api.js';
import { byId, draw, make, quantity, seconds, significant, table, whole } from './dom.js';
import { Roofline } from './roofline.js';

const EVERY_MS = 1000, KEPT = 60;

const TILES = [
  ['Running', ({ requests }) => [whole(requests.running), `of ${whole(requests.max_running)} at once`, requests.running]],
  ['Waiting', ({ requests }) => [whole(requests.waiting), `${whole(requests.refused)} refused so far`, requests.waiting]],
  ['Generated tokens', (_, { out }) => [`${significant(out)}/s`, '', out]],
  ['Prompt tokens', (_, { into }) => [`${significant(into)}/s`, 'of finished requests', into]],
  ['Time to first token', ({ ttft_s }) => median(ttft_s)],
  ['Time per output token', ({ tpot_s }) => median(tpot_s)],
  ['Pages used', ({ pages }) => {
    const used = sum(pages, 'used'), total = sum(pages, 'total');
    return [`${significant(total ? (100 * used) / total : 0)} %`, `${whole(used)} of ${whole(total)}`, used];
  }],
  ['Engine busy', (_, { busy, steps }) => [`${whole(100 * busy)} %`, `${significant(steps)} steps/s`, busy]],
];

const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);
const median = (found) => (found ? [seconds(found.p50), `p99 ${seconds(found.p99)}`, found.p50] : ['–', 'no answer yet', 0]);

export class Live {
  constructor() {
    this.roofline = new Roofline(byId('roofline'));
    this.series = TILES.map(() => []);
    this.tiles = TILES.map(([title]) => {
      const value = make('p', { class: 'value' }), more = make('p', { class: 'more' });
      const spark = draw('svg', { viewBox: '0 0 100 30', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
      byId('tiles').append(make('div', { class: 'tile' }, make('h3', {}, title), value, more, spark));
      return { value, more, spark };
    });
    document.addEventListener('visibilitychange', () => this.run(this.wanted));
  }

  run(wanted) {
    this.wanted = wanted;
    clearTimeout(this.timer);
    this.round = {};  // answers to earlier requests are dropped
    if (wanted && !document.hidden) this.#poll(this.round);
  }

  async #poll(round) {
    let now = null, problem = '';
    try {
      now = await (await ask('live')).json();
      if (now.engine.state !== 'ready') problem = `The engine is ${now.engine.state}.`;
    } catch (error) {
      problem = `${error.message} ${error.advice ?? ''}`.trim();
    }
    if (round !== this.round) return;
    this.#say(problem);
    if (now?.requests) this.#show(now);
    this.timer = setTimeout(() => this.#poll(round), EVERY_MS);
  }

  #say(problem) {
    const status = byId('live-status');
    if (status.textContent !== problem) status.textContent = problem;  // screen readers read only changes
    status.hidden = !problem;
  }

  #show(now) {
    const rates = between(this.before ?? now, now);
    this.before = now;
    TILES.forEach(([, of], i) => {
      const [value, more, number] = of(now, rates), tile = this.tiles[i];
      this.series[i] = [...this.series[i], number].slice(-KEPT);
      tile.value.textContent = value;
      tile.more.textContent = more;
      tile.spark.replaceChildren(...spark(this.series[i]));
    });
    this.roofline.show(now.roof, now.step);
    const names = [['time to first token', now.ttft_s], ['time per output token', now.tpot_s]];
    byId('latency').replaceChildren(table('Latency', [`last ${now.window_s} s`, 'p50', 'p90', 'p99'],
      names.map(([name, p]) => [name, ...['p50', 'p90', 'p99'].map((q) => (p ? seconds(p[q]) : '–'))])));
    byId('pages').replaceChildren(table('Pages of state', ['group', 'used', 'of', 'share'], now.pages.map((g) =>
      [g.group, whole(g.used), whole(g.total), make('meter', { min: 0, max: g.total, value: g.used, 'aria-label': `Pages of ${g.group} used` })])));
    byId('replicas').hidden = !now.replicas.length;
    byId('replicas').replaceChildren(table('Replicas', ['replica', 'state', 'running', 'answered', 'cached prompt tokens', 'restarts'],
      now.replicas.map((r) => [whole(r.replica), r.state, whole(r.running), whole(r.routed - r.running),
        r.prompt_tokens ? `${(100 * r.hit_tokens / r.prompt_tokens).toFixed(0)} %` : '–', whole(r.restarts)])));
    byId('engine').replaceChildren(table('Engine', ['since it started', 'total'], [
      ['steps', whole(now.engine.steps)],
      ['generated tokens', whole(now.tokens.generated)],
      ['prompt tokens', whole(now.tokens.prompt)],
      ['cached prompt tokens', whole(now.tokens.cached)],
      ['restarts', whole(now.engine.restarts)],
      ['bytes moved', quantity(now.engine.step_bytes, 'B')],
      ['operations', quantity(now.engine.step_flops, 'FLOP')],
    ]));
  }
}

// Rates of the counters. They are 0 after a restart of the engine, which resets its counters.
function between(before, now) {
  const time = now.engine.alive_s - before.engine.alive_s;
  const rate = (of) => (time > 0 ? Math.max(0, (of(now) - of(before)) / time) : 0);
  return {
    out: rate(({ tokens }) => tokens.generated),
    into: rate(({ tokens }) => tokens.prompt),
    steps: rate(({ engine }) => engine.steps),
    busy: Math.min(1, rate(({ engine }) => engine.busy_s)),
  };
}

function spark(values) {
  const most = Math.max(...values) || 1, last = Math.max(1, values.length - 1);
  const line = values.map((value, i) => `${(100 * (KEPT - 1 - last + i)) / (KEPT - 1)} ${29 - (27 * value) / most}`).join('L');
  const left = (100 * (KEPT - 1 - last)) / (KEPT - 1);
  return [draw('path', { class: 'spark-area', d: `M${left} 30L${line}L100 30Z` }), draw('path', { class: 'spark', d: `M${line}` })];
}
