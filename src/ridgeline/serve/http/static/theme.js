// The theme of all pages: light, dark, or that of the system. The page at / has the selection.

import * as storage from './storage.js';

const STORED = 'ridgeline-theme';

export const stored = () => storage.get('localStorage', STORED) ?? '';

export function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function choose(theme) {
  storage.set('localStorage', STORED, theme);
  apply(theme);
}
