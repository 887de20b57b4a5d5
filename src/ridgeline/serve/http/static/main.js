// The frame of the page: views, theme, API key, errors.

import { ask, setKey } from './api.js';
import { byId } from './dom.js';
import { Live } from './live.js';
import { Playground } from './playground.js';
import { hide } from './tokens.js';
import * as theme from './theme.js';

const VIEWS = ['playground', 'live'];

// Show an error in a notice, or hide the notice. Errors of one view are shown in it, errors of the server above all views.
function tell(notice, error) {
  notice.hidden = !error;
  notice.textContent = error ? `${error.message} ${error.advice ?? ''}`.trim() : '';
  if (error?.status === 401) {
    byId('key-form').hidden = false;
    byId('key').focus();
  }
}

const playground = new Playground((error) => tell(byId('playground-notice'), error));
const live = new Live();

async function begin() {
  try {
    const about = await (await ask('live')).json();
    byId('model').textContent = `${about.model} · ${about.device}`;
    byId('key-form').hidden = true;
    tell(byId('notice'), null);
    tell(byId('playground-notice'), null);
    playground.serve(about);
  } catch (error) {
    tell(byId('notice'), error);
  }
  show();
}

function show() {
  const asked = location.hash.slice(1), view = VIEWS.includes(asked) ? asked : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  hide();
  live.run(view === 'live');
}

byId('theme').addEventListener('change', (event) => theme.choose(event.target.value));
byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey(byId('key').value);
  begin();
});
addEventListener('hashchange', show);
addEventListener('scroll', hide, { passive: true });
theme.apply(theme.stored());
byId('theme').value = theme.stored();
begin();
