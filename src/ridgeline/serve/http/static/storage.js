// What this browser keeps. A browser may refuse to keep anything, or have no room left; the page works then too.

function attempt(work, otherwise) {
  try {
    return work();
  } catch {
    return otherwise;
  }
}

// area: 'localStorage' (until it is deleted) or 'sessionStorage' (as long as the tab is open).
export const get = (area, name) => attempt(() => globalThis[area].getItem(name), null);
export const set = (area, name, value) => attempt(() => { globalThis[area].setItem(name, value); return true; }, false);
export const remove = (area, name) => attempt(() => globalThis[area].removeItem(name));
export const names = (area, prefix) => attempt(() => Object.keys(globalThis[area]), []).filter((one) => one.startsWith(prefix));
