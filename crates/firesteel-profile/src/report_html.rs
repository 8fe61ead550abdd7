use crate::report::{Axis, Document, Figure, Mark, Point, Series, Unit};
use std::fmt::Write;

/// The page of a report: one file, without scripts and without anything that is loaded, readable
/// in light and dark. Every text is escaped, every figure has a title, a description and a table of
/// its values.
pub fn html(document: &Document) -> String {
    let mut page = String::new();
    let title = escape(&document.title);
    push(
        &mut page,
        format_args!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'unsafe-inline'\">\n<title>{title}</title>\n<style>\n{STYLE}</style>\n\
             </head>\n<body>\n<main>\n<h1>{title}</h1>\n<dl class=\"facts\">\n"
        ),
    );
    for (name, value) in &document.facts {
        let (name, value) = (escape(name), escape(value));
        push(&mut page, format_args!("<div><dt>{name}</dt><dd>{value}</dd></div>\n"));
    }
    page.push_str("</dl>\n");
    for figure in &document.figures {
        write_figure(&mut page, figure);
    }
    if !document.notes.is_empty() {
        page.push_str("<section class=\"notes\">\n<h2>Notes</h2>\n<ul>\n");
        for note in &document.notes {
            push(&mut page, format_args!("<li>{}</li>\n", escape(note)));
        }
        page.push_str("</ul>\n</section>\n");
    }
    page.push_str("</main>\n</body>\n</html>\n");
    page
}

const STYLE: &str = "\
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1f24; --quiet: #57606a; \
--line: #d5dae0; --s0: #1f5fbf; --s1: #b3541e; --s2: #1a7f5a; --s3: #8a3ea8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e9ed; \
--quiet: #9aa4af; --line: #343b44; --s0: #6ea8fe; --s1: #f2a065; --s2: #5fd0a5; --s3: #cf93e6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); \
font: 16px/1.5 system-ui, -apple-system, \"Segoe UI\", Roboto, \"DejaVu Sans\", sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
p { margin: 0 0 .75rem; color: var(--quiet); }
.facts { margin: 0 0 2rem; display: grid; gap: .25rem; }
.facts div { display: grid; grid-template-columns: 13rem 1fr; gap: 1rem; }
.facts dt { color: var(--quiet); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { .facts div { grid-template-columns: 1fr; gap: 0; } }
figure { margin: 0 0 2.5rem; padding: 1.25rem 0 0; border-top: 1px solid var(--line); }
.chart { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 30rem; height: auto; }
svg text { fill: var(--quiet); font-size: 13px; }
svg text.strong { fill: var(--text); }
svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .equal { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 3; fill: none; }
.line { fill: none; stroke-width: 2; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } \
.s2 { stroke: var(--s2); } .s3 { stroke: var(--s3); }
.f0 { fill: var(--s0); } .f1 { fill: var(--s1); } .f2 { fill: var(--s2); } .f3 { fill: var(--s3); }
.hollow { fill: var(--page); stroke-width: 2; }
.dashed { stroke-dasharray: 6 4; }
.legend { list-style: none; margin: 0 0 .5rem; padding: 0; display: flex; flex-wrap: wrap; \
gap: .25rem 1.25rem; font-size: .9rem; }
.legend svg { display: inline-block; width: 28px; min-width: 0; height: 12px; margin-right: .4rem; \
vertical-align: middle; }
details { margin-top: .5rem; font-size: .9rem; }
summary { cursor: pointer; color: var(--quiet); }
.values { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
caption { text-align: left; color: var(--quiet); padding: .25rem 0; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.notes { border-top: 1px solid var(--line); padding-top: 1.25rem; color: var(--quiet); }
.notes h2 { color: var(--text); }
";

/// Writing to a string cannot fail.
fn push(page: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = page.write_fmt(text);
}

/// A text as content or as the value of an attribute in double quotes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // What no page may hold, and what would reorder a line.
            c if c.is_control() && c != '\n' => escaped.push('\u{fffd}'),
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

fn write_figure(page: &mut String, figure: &Figure) {
    let id = escape(&figure.id);
    push(
        page,
        format_args!(
            "<figure id=\"{id}\">\n<figcaption><h2>{}</h2>\n<p>{}</p></figcaption>\n",
            escape(&figure.title),
            escape(&figure.description)
        ),
    );
    if figure.series.len() > 1 {
        page.push_str("<ul class=\"legend\">\n");
        for (index, series) in figure.series.iter().enumerate() {
            let style = Style::of(index, figure.mark, series);
            push(
                page,
                format_args!(
                    "<li><svg viewBox=\"0 0 28 12\" aria-hidden=\"true\">{}</svg>{}</li>\n",
                    style.sample(),
                    escape(&series.name)
                ),
            );
        }
        page.push_str("</ul>\n");
    }
    page.push_str("<div class=\"chart\">\n");
    match figure.mark {
        Mark::Bars => write_bars(page, figure, &id),
        Mark::Lines | Mark::Scatter => write_plane(page, figure, &id),
    }
    page.push_str("</div>\n");
    write_values(page, figure);
    page.push_str("</figure>\n");
}

/// Colours and dashes of a series.
struct Style {
    colour: usize,
    mark: Mark,
    dashed: bool,
}

/// Colours of series; further ones begin again.
const COLOURS: usize = 4;

impl Style {
    fn of(index: usize, mark: Mark, series: &Series) -> Self {
        Self { colour: index % COLOURS, mark, dashed: series.basis.starts_with("estimated") }
    }

    fn line_class(&self) -> String {
        let dashed = if self.dashed { " dashed" } else { "" };
        format!("line s{}{dashed}", self.colour)
    }

    fn sample(&self) -> String {
        match self.mark {
            Mark::Lines => format!(
                "<path class=\"{}\" d=\"M0 6H28\"/>{}",
                self.line_class(),
                self.point(14.0, 6.0, !self.dashed)
            ),
            Mark::Bars | Mark::Scatter => self.point(14.0, 6.0, true),
        }
    }

    /// A point; each series has a shape of its own, so that no colour has to be told apart.
    fn point(&self, x: f64, y: f64, filled: bool) -> String {
        let class = if filled {
            format!("f{0} s{0}", self.colour)
        } else {
            format!("hollow s{}", self.colour)
        };
        match self.colour {
            0 => format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>"),
            1 => format!(
                "<rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"7.5\" height=\"7.5\"/>",
                x - 3.75,
                y - 3.75
            ),
            2 => format!("<path class=\"{class}\" d=\"M{x:.1} {:.1}l4.5 8h-9z\"/>", y - 4.8),
            _ => format!("<path class=\"{class}\" d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\"/>", y - 5.0),
        }
    }
}

/// Size of a plot and of the room around its plane.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 52.0;

fn open_svg(page: &mut String, figure: &Figure, id: &str, height: f64) {
    push(
        page,
        format_args!(
            "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-description\">\n<title id=\"{id}-title\">{}</title>\n\
             <desc id=\"{id}-description\">{}</desc>\n",
            escape(&figure.title),
            escape(&figure.description)
        ),
    );
}

/// How values lie along an axis.
struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Scale {
    /// A scale on which all values lie; a logarithmic one needs positive ones.
    fn new(axis: &Axis, values: impl Iterator<Item = f64>) -> Self {
        let positive = |value: &f64| value.is_finite() && (*value > 0.0 || !axis.logarithmic);
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(positive) {
            low = low.min(value);
            high = high.max(value);
        }
        if low > high {
            (low, high) = (1.0, 2.0);
        }
        if axis.logarithmic {
            let (mut first, mut last) = (low.log2().floor(), high.log2().ceil());
            if last - first < 1.0 {
                (first, last) = (first - 1.0, first + 1.0);
            }
            let step = ((last - first) / 7.0).ceil().max(1.0);
            let ticks = (0..=7)
                .map(|tick| first + step * f64::from(tick))
                .take_while(|power| *power <= last + 1e-9)
                .map(f64::exp2)
                .collect();
            return Self { low: first.exp2(), high: last.exp2(), logarithmic: true, ticks };
        }
        let low = low.min(0.0);
        let high = if high > low { high } else { low + 1.0 };
        // 1, 2 or 5 times a power of ten; of bytes a power of two.
        let rough = (high - low) / 5.0;
        let step = if axis.unit == Unit::Bytes {
            rough.log2().ceil().exp2()
        } else {
            let power = 10f64.powf(rough.log10().floor());
            let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough);
            step.unwrap_or(10.0) * power
        };
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let ticks = (0..=((last - first) as u32).min(20))
            .map(|tick| (first + f64::from(tick)) * step)
            .collect();
        Self { low: first * step, high: last * step, logarithmic: false, ticks }
    }

    /// Where a value is, from 0 to 1; `None` for one that the scale does not have.
    fn place(&self, value: f64) -> Option<f64> {
        let place = match self.logarithmic {
            true if value <= 0.0 => return None,
            true => (value / self.low).log2() / (self.high / self.low).log2(),
            false => (value - self.low) / (self.high - self.low),
        };
        place.is_finite().then(|| place.clamp(0.0, 1.0))
    }
}

fn write_plane(page: &mut String, figure: &Figure, id: &str) {
    open_svg(page, figure, id, HEIGHT);
    let points = || figure.series.iter().flat_map(|series| &series.points);
    let (xs, ys) = if figure.mark == Mark::Scatter {
        // Both axes are the same, so that the line of equal values is the diagonal.
        let both = || points().flat_map(|point| point.x.into_iter().chain([point.y]));
        (Scale::new(&figure.x, both()), Scale::new(&figure.y, both()))
    } else {
        let xs = Scale::new(&figure.x, points().filter_map(|point| point.x));
        (xs, Scale::new(&figure.y, points().map(|point| point.y)))
    };
    let (width, height) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
    let x_at = |place: f64| LEFT + place * width;
    let y_at = |place: f64| TOP + (1.0 - place) * height;
    for tick in &ys.ticks {
        let Some(y) = ys.place(*tick).map(y_at) else { continue };
        push(
            page,
            format_args!(
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>\n",
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.5,
                number(*tick, figure.y.unit)
            ),
        );
    }
    for tick in &xs.ticks {
        let Some(x) = xs.place(*tick).map(x_at) else { continue };
        push(
            page,
            format_args!(
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{:.1}\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
                 text-anchor=\"middle\">{}</text>\n",
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 20.0,
                number(*tick, figure.x.unit)
            ),
        );
    }
    if figure.mark == Mark::Scatter {
        push(
            page,
            format_args!(
                "<path class=\"equal\" d=\"M{LEFT} {:.1}L{:.1} {TOP}\"/>\n",
                HEIGHT - BOTTOM,
                WIDTH - RIGHT
            ),
        );
    }
    push(
        page,
        format_args!(
            "<text class=\"strong\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text class=\"strong\" transform=\"translate(16 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>\n",
            LEFT + width / 2.0,
            HEIGHT - 10.0,
            axis_label(&figure.x),
            TOP + height / 2.0,
            axis_label(&figure.y)
        ),
    );
    for (index, series) in figure.series.iter().enumerate() {
        let style = Style::of(index, figure.mark, series);
        let places: Vec<(f64, f64, &Point)> = series
            .points
            .iter()
            .filter_map(|point| Some((x_at(xs.place(point.x?)?), y_at(ys.place(point.y)?), point)))
            .collect();
        if figure.mark == Mark::Lines && places.len() > 1 {
            let path: Vec<String> =
                places.iter().map(|(x, y, _)| format!("{x:.1} {y:.1}")).collect();
            push(
                page,
                format_args!(
                    "<path class=\"{}\" d=\"M{}\"/>\n",
                    style.line_class(),
                    path.join("L")
                ),
            );
        }
        for (x, y, point) in places {
            let sure = ["measured", "counted", "published", "imported"];
            let filled = sure.iter().any(|basis| point.basis.starts_with(basis));
            let mut text = format!("{}: ", series.name);
            if let Some(x) = point.x {
                text.push_str(&format!("{} ", exact(x, figure.x.unit)));
            }
            text.push_str(&format!("→ {}, {}", exact(point.y, figure.y.unit), point.basis));
            push(
                page,
                format_args!(
                    "<g><title>{}</title>{}</g>\n",
                    escape(&text),
                    style.point(x, y, filled)
                ),
            );
        }
    }
    page.push_str("</svg>\n");
}

/// Height of a bar and its gap, and the room for names and values.
const ROW: f64 = 28.0;
const NAMES: f64 = 190.0;
const VALUES: f64 = 110.0;

fn write_bars(page: &mut String, figure: &Figure, id: &str) {
    let rows = figure.series.iter().flat_map(|series| &series.points);
    let count = rows.clone().count() as f64;
    let height = TOP + count * ROW + BOTTOM;
    open_svg(page, figure, id, height);
    let scale = Scale::new(&figure.y, rows.clone().map(|point| point.y).chain([0.0]));
    let width = WIDTH - NAMES - VALUES;
    let zero = scale.place(0.0).unwrap_or(0.0);
    for tick in &scale.ticks {
        let Some(place) = scale.place(*tick) else { continue };
        let x = NAMES + place * width;
        push(
            page,
            format_args!(
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{:.1}\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
                 text-anchor=\"middle\">{}</text>\n",
                height - BOTTOM,
                height - BOTTOM + 20.0,
                number(*tick, figure.y.unit)
            ),
        );
    }
    for (row, point) in rows.enumerate() {
        let y = TOP + row as f64 * ROW + 4.0;
        let place = scale.place(point.y).unwrap_or(zero);
        let (from, to) = (zero.min(place), zero.max(place));
        let name = point.label.as_deref().unwrap_or("");
        let value = number(point.y, figure.y.unit);
        push(
            page,
            format_args!(
                "<g><title>{}</title><text class=\"strong\" x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text><rect class=\"f0\" x=\"{:.1}\" y=\"{y:.1}\" \
                 width=\"{:.1}\" height=\"{:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\">{value}</text></g>\n",
                escape(&format!("{name}: {}, {}", exact(point.y, figure.y.unit), point.basis)),
                NAMES - 10.0,
                y + 15.0,
                escape(&shortened(name)),
                NAMES + from * width,
                ((to - from) * width).max(0.5),
                ROW - 8.0,
                NAMES + to * width + 6.0,
                y + 15.0,
            ),
        );
    }
    push(
        page,
        format_args!(
            "<text class=\"strong\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n</svg>\n",
            NAMES + width / 2.0,
            height - 10.0,
            axis_label(&figure.y)
        ),
    );
}

/// Most characters of a name beside a bar; the table has it whole.
const NAME: usize = 24;

fn shortened(name: &str) -> String {
    match name.char_indices().nth(NAME) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

fn axis_label(axis: &Axis) -> String {
    let unit = match axis.unit {
        Unit::Milliseconds => ", ms",
        Unit::Microseconds => ", µs",
        Unit::Cycles => ", cycles",
        Unit::Entries | Unit::Bytes | Unit::Name => "",
    };
    escape(&format!("{}{unit}", axis.label))
}

fn write_values(page: &mut String, figure: &Figure) {
    push(
        page,
        format_args!(
            "<details><summary>Values</summary>\n<div class=\"values\"><table>\n<caption>{}</caption>\n\
             <thead><tr><th scope=\"col\">series</th><th scope=\"col\">{}</th><th scope=\"col\">{}</th>\
             <th scope=\"col\">basis</th></tr></thead>\n<tbody>\n",
            escape(&figure.title),
            axis_label(&figure.x),
            axis_label(&figure.y)
        ),
    );
    for series in &figure.series {
        for point in &series.points {
            let place = match (&point.label, point.x) {
                (Some(label), Some(x)) => format!("{label}: {}", exact(x, figure.x.unit)),
                (Some(label), None) => label.clone(),
                (None, Some(x)) => exact(x, figure.x.unit),
                (None, None) => String::new(),
            };
            push(
                page,
                format_args!(
                    "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"number\">{}</td><td>{}</td>\
                     </tr>\n",
                    escape(&series.name),
                    escape(&place),
                    exact(point.y, figure.y.unit),
                    escape(&point.basis)
                ),
            );
        }
    }
    page.push_str("</tbody>\n</table></div>\n</details>\n");
}

/// A number as a table has it.
fn exact(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Entries | Unit::Bytes | Unit::Cycles | Unit::Name => format!("{value:.0}"),
        Unit::Milliseconds | Unit::Microseconds => format!("{value:.3}"),
    }
}

/// A number as an axis or a bar has it, escaped.
fn number(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => {
            let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
            let fits = |(_, power): &&(&str, i32)| value.abs() >= 2f64.powi(*power);
            match units.iter().find(fits) {
                Some((unit, power)) => format!("{} {unit}", short(value / 2f64.powi(*power))),
                None => format!("{} B", short(value)),
            }
        }
        Unit::Entries if value >= 1024.0 && value % 1024.0 == 0.0 => {
            let thousands = value / 1024.0;
            if thousands >= 1024.0 && thousands % 1024.0 == 0.0 {
                format!("{}M", short(thousands / 1024.0))
            } else {
                format!("{}k", short(thousands))
            }
        }
        Unit::Milliseconds | Unit::Microseconds if value > 0.0 && value < 0.005 => {
            "&lt; 0.01".to_owned()
        }
        _ if value.abs() >= 1e6 => format!("{}·10⁶", short(value / 1e6)),
        _ => short(value),
    }
}

/// Up to three digits that matter.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, unit, text) in [
            (0.0, Unit::Milliseconds, "0"),
            (27.363, Unit::Milliseconds, "27.4"),
            (0.831, Unit::Milliseconds, "0.83"),
            (0.002, Unit::Milliseconds, "&lt; 0.01"),
            (131_072.0, Unit::Entries, "128k"),
            (1_048_576.0, Unit::Entries, "1M"),
            (1000.0, Unit::Entries, "1000"),
            (80_697_344.0, Unit::Bytes, "77 MiB"),
            (512.0, Unit::Bytes, "512 B"),
            (3.5e9, Unit::Cycles, "3500·10⁶"),
        ] {
            assert_eq!(number(value, unit), text);
        }
    }

    #[test]
    fn scales_hold_their_values() {
        let axis = |logarithmic| Axis { label: "a".into(), unit: Unit::Bytes, logarithmic };
        let cases: [(bool, &[f64]); 8] = [
            (false, &[]),
            (false, &[0.0]),
            (false, &[-3.0, 7.0]),
            (false, &[27.4, 31.6]),
            (false, &[1e-12, 1e12, f64::NAN, f64::INFINITY]),
            (true, &[]),
            (true, &[0.0, -1.0, 5.0]),
            (true, &[1024.0, 1_048_576.0]),
        ];
        for (logarithmic, values) in cases {
            let scale = Scale::new(&axis(logarithmic), values.iter().copied());
            assert!(scale.low < scale.high, "{values:?}");
            assert!((2..=21).contains(&scale.ticks.len()), "{values:?} {:?}", scale.ticks);
            let whole = |tick: &f64| {
                logarithmic || (tick / (scale.ticks[1] - scale.ticks[0])).fract() == 0.0
            };
            assert!(scale.ticks.iter().all(whole), "{values:?} {:?}", scale.ticks);
            for tick in &scale.ticks {
                assert!(scale.place(*tick).is_some(), "{values:?} {tick}");
            }
            for value in values.iter().filter(|v| v.is_finite() && (**v > 0.0 || !logarithmic)) {
                assert!(scale.low <= *value && *value <= scale.high, "{values:?} {value}");
            }
        }
    }

    #[test]
    fn texts_are_escaped() {
        let text = "<script src='x' onload=\"y\">&\u{202e}\u{7}";
        let escaped = "&lt;script src=&#39;x&#39; onload=&quot;y&quot;&gt;&amp;\u{fffd}\u{fffd}";
        assert_eq!(escape(text), escaped);
        let document = Document {
            title: text.into(),
            facts: vec![(text.into(), text.into())],
            notes: vec![text.into()],
            figures: vec![Figure {
                id: text.into(),
                title: text.into(),
                description: text.into(),
                mark: Mark::Bars,
                x: Axis { label: text.into(), unit: Unit::Name, logarithmic: false },
                y: Axis { label: text.into(), unit: Unit::Bytes, logarithmic: false },
                series: vec![
                    Series {
                        name: text.into(),
                        basis: text.into(),
                        points: vec![Point {
                            label: Some(text.into()),
                            x: None,
                            y: 1.0,
                            basis: text.into(),
                        }],
                    };
                    2
                ],
            }],
        };
        for mark in [Mark::Bars, Mark::Lines, Mark::Scatter] {
            let mut document = document.clone();
            document.figures[0].mark = mark;
            let page = html(&document);
            assert!(!page.contains("<script") && !page.contains("onload=\""), "{mark:?}");
        }
    }
}
