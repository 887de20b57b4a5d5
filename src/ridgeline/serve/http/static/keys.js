// Enter sends, Shift+Enter starts a new line. On-screen keyboards have no Shift+Enter, so there Enter starts a new line.

const onScreen = matchMedia('(hover: none) and (pointer: coarse)');

export function sends(event) {
  if (event.key !== 'Enter' || event.isComposing) return false;  // this Enter belongs to an input method
  return event.ctrlKey || event.metaKey || !(event.shiftKey || onScreen.matches);
}

export const help = () => (onScreen.matches ? [] : [['Enter'], ' sends, ', ['Shift', 'Enter'], ' starts a new line, ', ['Esc'], ' stops.']);
