addEventListener('load', () => {const images = [...document.images];
    document.body.dataset.drawn = images.filter(each => each.complete && each.naturalWidth > 0).length;
    document.body.dataset.images = images.length;
    // A screen may be narrow: pictures keep their size, the page does not scroll sideways.
    document.body.dataset.full = images.filter(each => each.clientWidth === each.naturalWidth).length;
    document.body.dataset.sideways = document.documentElement.scrollWidth - innerWidth;});
{const tables = [...document.querySelectorAll("table")];
    const table = tables.find(each => each.caption.textContent.startsWith("Speed-up"));
    const heads = [...table.tHead.rows[0].cells];
    const n = heads.findIndex(head => head.textContent === "T = 64k");
    const column = () => [...table.tBodies[0].rows].map(row => row.cells[n].dataset.value || "none").join(" ");
    for (const name of ["up", "down"]) {
        heads[n].querySelector("button").click();
        document.body.dataset[name] = heads[n].getAttribute("aria-sort") + " " + column();
    }}
{const acts = [...document.querySelectorAll("a, button, summary, .scroll")];
    document.body.dataset.acts = acts.length;
    document.body.dataset.focused = acts.filter(each => {
        const shut = each.closest("details:not([open])");
        sections.forEach(fold => { fold.open = true; });
        if (shut && each !== shut.querySelector("summary")) { shut.open = true; }
        each.focus();
        return document.activeElement === each;
    }).length;
    const links = [...document.querySelectorAll('a[href^="#"]')];
    document.body.dataset.dangling = links.filter(each => !document.getElementById(each.hash.slice(1))).length;}
{const figures = [...document.querySelectorAll("figure img")];
    const holder = document.body.appendChild(document.createElement("div"));
    // As in a font that is a thirtieth wider than the one that matplotlib measured.
    holder.style.letterSpacing = "0.02em";
    const texts = figures.flatMap(each => {
        const packed = each.src.split(",")[1];
        holder.innerHTML = new TextDecoder().decode(Uint8Array.from(atob(packed), letter => letter.charCodeAt(0)));
        const edge = holder.querySelector("svg").getBoundingClientRect();
        return [...holder.querySelectorAll("text")].map(text => {
            const box = text.getBoundingClientRect();
            return box.left >= edge.left && box.right <= edge.right && box.top >= edge.top && box.bottom <= edge.bottom;
        });
    });
    holder.remove();
    document.body.dataset.texts = texts.length;
    document.body.dataset.whole = texts.filter(Boolean).length;}
