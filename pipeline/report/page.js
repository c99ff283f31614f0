// The values under the pointer: without this script the page lacks only them.
for (const svg of document.querySelectorAll(".charts svg")) {
  const curves = [...svg.querySelectorAll(".curve")].map((curve) => ({
    name: curve.dataset.name,
    look: curve.getAttribute("class").replace("curve", "chip"),
    x: curve.dataset.x.split(" "),
    y: curve.dataset.y.split(" "),
    places: curve.getAttribute("points").split(" ").map((pair) => parseFloat(pair)),
  }));
  const figure = svg.parentElement, cursor = svg.querySelector(".cursor"), unit = svg.querySelector(".label").textContent;
  const box = document.createElement("div");
  box.className = "hover";
  box.hidden = true;
  figure.append(box);
  svg.addEventListener("pointermove", (event) => {
    const scale = svg.viewBox.baseVal.width / svg.clientWidth;
    const at = (event.clientX - svg.getBoundingClientRect().left) * scale;
    const nearest = curves.map(({ places }) =>
      places.reduce((best, place, index) => (Math.abs(place - at) < Math.abs(places[best] - at) ? index : best), 0));
    const first = curves.reduce((best, curve, number) =>
      Math.abs(curve.places[nearest[number]] - at) < Math.abs(curves[best].places[nearest[best]] - at) ? number : best, 0);
    const place = curves[first].places[nearest[first]];
    cursor.setAttribute("d", `M${place} 10V214`);
    box.replaceChildren(`${unit} ${curves[first].x[nearest[first]]}`);
    curves.forEach((curve, number) => {
      const row = document.createElement("div"), chip = document.createElement("span");
      chip.className = curve.look;
      row.append(chip, `${curve.y[nearest[number]]}  ${curve.name}`);
      box.append(row);
    });
    box.hidden = false;
    const left = Math.min(place / scale + 14, figure.clientWidth - box.offsetWidth);
    box.style.left = `${Math.max(0, left)}px`;
    box.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + 8}px`;
  });
  svg.addEventListener("pointerleave", () => {
    box.hidden = true;
    cursor.setAttribute("d", "");
  });
}
