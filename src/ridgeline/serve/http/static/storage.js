// Access the browser's storage. A browser may refuse to store data or have no space left; the page works without it.

function attempt(work, otherwise) {
  try {
    return work();
  } catch {
    return otherwise;
  }
}

// area: 'localStorage' (kept until deleted) or 'sessionStorage' (kept while the tab is open).
export const get = (area, name) => attempt(() => globalThis[area].getItem(name), null);
export const set = (area, name, value) => attempt(() => { globalThis[area].setItem(name, value); return true; }, false);
export const remove = (area, name) => attempt(() => globalThis[area].removeItem(name));
export const names = (area, prefix) => attempt(() => Object.keys(globalThis[area]), []).filter((one) => one.startsWith(prefix));
