// Enter sends, Shift+Enter breaks a line. A keyboard on the screen has no Shift+Enter: there Enter breaks a line.

const onScreen = matchMedia('(hover: none) and (pointer: coarse)');

export function sends(event) {
  if (event.key !== 'Enter' || event.isComposing) return false;  // an input method takes its Enter for itself
  return event.ctrlKey || event.metaKey || !(event.shiftKey || onScreen.matches);
}

export const help = () => (onScreen.matches ? [] : [['Enter'], ' sends, ', ['Shift', 'Enter'], ' breaks a line, ', ['Esc'], ' stops.']);
