// Light or dark: as the system has it, unless somebody chose. Both pages share the choice.

// a browser that keeps nothing for pages raises at the name alone
function keptTheme(...name) {
  try {
    if (name.length > 0) localStorage.setItem("theme", name[0]);
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

// onChange: what must be drawn anew in other colours
export function setUpTheme(onChange = () => {}) {
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    onChange();
  };
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const wantedTheme = () => keptTheme() ?? (preferred.matches ? "dark" : "light");
  setTheme(wantedTheme());
  preferred.addEventListener("change", () => setTheme(wantedTheme()));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    keptTheme(document.documentElement.dataset.theme);
  });
}
