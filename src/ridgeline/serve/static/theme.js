// Dark, light, or what the system says: chosen on the page at /, the same everywhere.

const STORED = 'ridgeline-theme';

export const stored = () => localStorage.getItem(STORED) ?? '';

export function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function choose(theme) {
  localStorage.setItem(STORED, theme);
  apply(theme);
}
