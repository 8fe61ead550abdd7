use crate::estimate::{Alternative, EstimatedStep};
use crate::fit::Fit;
use crate::groups::Grouped;
use crate::{Basis, Composition, Memory, PartKind, Provenance, Quantity};
use serde::Serialize;
use std::cmp::Ordering;

/// What a report shows: figures with exactly the values that are plotted, and what is to be known
/// of them. [`html`](crate::html) makes a page of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Document {
    /// Title of the page.
    pub title: String,
    /// What the page begins with: a name and its value.
    pub facts: Vec<(String, String)>,
    /// The figures.
    pub figures: Vec<Figure>,
    /// What is to be known of them.
    pub notes: Vec<String>,
}

/// A figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Name within the page.
    pub id: String,
    /// Title.
    pub title: String,
    /// What it shows, in a sentence or two.
    pub description: String,
    /// What is drawn.
    pub mark: Mark,
    /// The horizontal axis; of bars the vertical one, which has the names.
    pub x: Axis,
    /// The axis of the values.
    pub y: Axis,
    /// What is plotted.
    pub series: Vec<Series>,
}

/// What is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// A line through points.
    Lines,
    /// A bar for each name.
    Bars,
    /// Points beside the line on which x and y are equal.
    Scatter,
}

/// An axis.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// What it measures.
    pub label: String,
    /// In which unit.
    pub unit: Unit,
    /// Whether equal steps are equal factors.
    pub logarithmic: bool,
}

/// The unit of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Entries of a cache.
    Entries,
    /// Bytes.
    Bytes,
    /// Milliseconds.
    Milliseconds,
    /// Microseconds.
    Microseconds,
    /// Cycles.
    Cycles,
    /// Names.
    Name,
}

/// Points that belong together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How its values came about.
    pub basis: String,
    /// The points.
    pub points: Vec<Point>,
}

/// A point.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Its name: of a bar what it stands for, of a measured point what was measured.
    pub label: Option<String>,
    /// Where it is on the first axis; `None` for a bar.
    pub x: Option<f64>,
    /// Its value.
    pub y: f64,
    /// How this value came about.
    pub basis: String,
}

/// What a report is made of. What is not known is left out.
#[derive(Debug, Clone, Copy)]
pub struct ReportInput<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// What else identifies the step, as precision and layout.
    pub step: &'a str,
    /// Weights and caches at some contexts.
    pub memory: &'a Memory,
    /// The step composed of measured layers.
    pub composed: Option<&'a Composition>,
    /// The estimated step by context; the first one is shown by group of operators.
    pub estimated: &'a [(usize, EstimatedStep)],
    /// The estimated step of the same model with full layers only.
    pub estimated_all_full: &'a [(usize, EstimatedStep)],
    /// The device's fit.
    pub fit: Option<&'a Fit>,
    /// What operators took or are planned to move, by group.
    pub groups: &'a [Grouped],
    /// The step beside alternatives.
    pub alternatives: &'a [Alternative],
}

/// How far a number can be trusted, as all figures say it.
const COUNTED: &str = "counted";
const ESTIMATED: &str = "estimated";
const COMPOSED: &str = "composed of measured layers";

impl Document {
    /// The figures of a report: memory of keys and values against the context, time of a step
    /// against the context, time by group of operators, fitted against measured times, and
    /// alternatives. A figure without a value is left out, and a note says so.
    pub fn new(input: &ReportInput<'_>) -> Self {
        let mut notes = vec![
            "Counted numbers follow from shapes, estimated ones from a fit; neither is measured."
                .to_owned(),
        ];
        let figures: Vec<Figure> = [
            Some(kv_memory(input)),
            step_time(input),
            estimated_groups(input),
            measured_and_fitted(input),
            alternatives(input),
        ]
        .into_iter()
        .flatten()
        .chain(input.groups.iter().enumerate().map(|(index, grouped)| groups(index, grouped)))
        .filter(|figure| figure.series.iter().any(|series| !series.points.is_empty()))
        .collect();
        if input.groups.iter().any(|grouped| grouped.provenance == Provenance::Compiled) {
            notes.push(
                "What the compiler fuses counts with one of the nodes: the matrix before the GELU \
                 may count as GELU."
                    .to_owned(),
            );
        }
        for (id, what) in [
            ("step-time", "the time of a step"),
            ("estimated-groups", "the time by group of operators"),
            ("measured-estimated", "measured beside estimated times"),
        ] {
            if figures.iter().all(|figure| figure.id != id) {
                notes.push(format!("There is nothing to show of {what}."));
            }
        }
        let mut facts = vec![
            ("Model".to_owned(), input.model.to_owned()),
            ("Step".to_owned(), input.step.to_owned()),
        ];
        if let Some(fit) = input.fit {
            facts.push(("Device".into(), format!("{}, {}", fit.device, fit.soc)));
            facts.push((
                "Runtime and precision".into(),
                format!("{}, {}", fit.selection.runtime, fit.selection.precision),
            ));
            let terms: Vec<String> = fit
                .terms
                .iter()
                .map(|term| match (term.value, term.left_out) {
                    (Some(value), _) => format!("{} {value:.1} {}", term.term.name(), term.unit),
                    (None, why) => {
                        format!("{} left out ({})", term.term.name(), why.unwrap_or("unknown"))
                    }
                })
                .collect();
            facts.push(("Fit".into(), terms.join(", ")));
            let percent = |value: Option<f64>| {
                value.map_or("not known".to_owned(), |value| format!("{value:.1} %"))
            };
            facts.push((
                "Error of the fit".into(),
                format!(
                    "at most {:.1} %, RMS {}, RMS of rows left out {}, on {} row{}",
                    fit.max_percent,
                    percent(fit.rms_percent),
                    percent(fit.left_out_rms_percent),
                    fit.rows.len(),
                    if fit.rows.len() == 1 { "" } else { "s" }
                ),
            ));
            if fit.timing_only {
                notes.push(
                    "The fitted rows are timing only: those builds compute something else than \
                     the model."
                        .to_owned(),
                );
            }
        }
        if let Some(composed) = input.composed {
            if composed.timing_only {
                notes.push("The composed times are of timing-only builds.".to_owned());
            }
            for source in &composed.sources {
                notes.push(format!("Times {}: {}.", source.origin.name(), source.text));
            }
        }
        let title = format!("What a step of {} costs", input.model);
        Self { title, facts, figures, notes }
    }
}

fn axis(label: &str, unit: Unit, logarithmic: bool) -> Axis {
    Axis { label: label.to_owned(), unit, logarithmic }
}

fn at(x: usize, y: f64, basis: &str) -> Point {
    Point { label: None, x: Some(x as f64), y, basis: basis.to_owned() }
}

fn kv_memory(input: &ReportInput<'_>) -> Figure {
    let series = |name: &str, bytes: &dyn Fn(&crate::ContextMemory) -> u64| Series {
        name: name.to_owned(),
        basis: COUNTED.to_owned(),
        points: input
            .memory
            .contexts
            .iter()
            .map(|memory| at(memory.context, bytes(memory) as f64, COUNTED))
            .collect(),
    };
    Figure {
        id: "kv-memory".into(),
        title: "Memory of keys and values".into(),
        description: format!(
            "Bytes of one sequence's caches in {} against the context, with the model's sliding \
             layers and as if every layer kept the whole context.",
            input.memory.kv
        ),
        mark: Mark::Lines,
        x: axis("context", Unit::Entries, true),
        y: axis("keys and values", Unit::Bytes, true),
        series: vec![
            series("hybrid", &|memory| memory.kv_bytes),
            series("all layers full", &|memory| memory.kv_all_full_bytes),
        ],
    }
}

fn step_time(input: &ReportInput<'_>) -> Option<Figure> {
    let estimated = |steps: &[(usize, EstimatedStep)]| -> Vec<Point> {
        let plausible = |(context, step): &(usize, EstimatedStep)| {
            let beyond = step.parts.iter().any(|part| !part.beyond.is_empty());
            let basis = if beyond { "estimated, outside of the rows" } else { ESTIMATED };
            at(*context, step.step_ms, basis)
        };
        let mut points: Vec<Point> = steps.iter().map(plausible).collect();
        // A line goes from left to right.
        points.sort_by(|a, b| a.x.partial_cmp(&b.x).unwrap_or(Ordering::Equal));
        points
    };
    let mut series = vec![
        Series {
            name: "hybrid, estimated".into(),
            basis: ESTIMATED.into(),
            points: estimated(input.estimated),
        },
        Series {
            name: "all layers full, estimated".into(),
            basis: ESTIMATED.into(),
            points: estimated(input.estimated_all_full),
        },
    ];
    let mut head = "";
    if let Some(composed) = input.composed {
        let whole = composed.steps.iter().any(|step| step.step_ms.is_some());
        if !whole {
            head = " Composed times are without the head, which was not measured.";
        }
        let basis = |basis: Option<Basis>| basis.map_or("unknown", Basis::name);
        let points = |ms: &dyn Fn(&crate::ComposedStep) -> Option<f64>| -> Vec<Point> {
            let steps = composed.steps.iter();
            steps.filter_map(|s| Some(at(s.context, ms(s)?, basis(s.basis)))).collect()
        };
        let head_ms = |step: &crate::ComposedStep| step.head.map_or(0.0, |head| head.ms);
        series.push(Series {
            name: "hybrid, composed".into(),
            basis: COMPOSED.into(),
            points: points(&|step| if whole { step.step_ms } else { step.layers_ms }),
        });
        series.push(Series {
            name: "all layers full, composed".into(),
            basis: COMPOSED.into(),
            points: points(&|step| {
                let full = step.all_full_ms?;
                if !whole {
                    return Some(full);
                }
                step.head?;
                Some(full + head_ms(step))
            }),
        });
    }
    series.retain(|series| !series.points.is_empty());
    (!series.is_empty()).then(|| Figure {
        id: "step-time".into(),
        title: "Time of a step".into(),
        description: format!(
            "Milliseconds of one token against the context, for the model and for as many full \
             layers. Estimated times are those of the fit; composed ones add measured layers \
             up.{head}"
        ),
        mark: Mark::Lines,
        x: axis("context", Unit::Entries, true),
        y: axis("time of a step", Unit::Milliseconds, false),
        series,
    })
}

fn bar(label: &str, y: f64, basis: &str) -> Point {
    Point { label: Some(label.to_owned()), x: None, y, basis: basis.to_owned() }
}

fn estimated_groups(input: &ReportInput<'_>) -> Option<Figure> {
    let (context, step) = input.estimated.first()?;
    let points = step.groups.iter().map(|group| {
        bar(group.group.map_or("overhead of a part", |group| group.name()), group.ms, ESTIMATED)
    });
    Some(Figure {
        id: "estimated-groups".into(),
        title: "Where the time goes".into(),
        description: format!(
            "Estimated milliseconds of a step at context {context} by group of operators: the \
             time of a group's bytes and operations by the fit."
        ),
        mark: Mark::Bars,
        x: axis("group of operators", Unit::Name, false),
        y: axis("estimated time", Unit::Milliseconds, false),
        series: vec![Series {
            name: "estimated".into(),
            basis: ESTIMATED.into(),
            points: points.collect(),
        }],
    })
}

fn groups(index: usize, grouped: &Grouped) -> Figure {
    let basis = match grouped.provenance {
        Provenance::Measured => "measured",
        Provenance::Imported => "imported",
        Provenance::Compiled => "planned by the compiler",
        Provenance::Estimated => ESTIMATED,
    };
    let (unit, what) = match grouped.quantity {
        Quantity::Cycles => (Unit::Cycles, "cycles"),
        Quantity::Microseconds => (Unit::Microseconds, "time"),
        Quantity::Bytes => (Unit::Bytes, "bytes"),
    };
    let points = grouped.groups.iter().map(|group| bar(group.group.name(), group.amount, basis));
    Figure {
        id: format!("groups-{index}"),
        title: format!("By group of operators: {}", grouped.source),
        description: format!(
            "The {what} of the operators of {}, added up by group; what bears no name of our \
             graphs is called other.",
            grouped.source
        ),
        mark: Mark::Bars,
        x: axis("group of operators", Unit::Name, false),
        y: axis(&format!("{what}, {basis}"), unit, false),
        series: vec![Series { name: basis.into(), basis: basis.into(), points: points.collect() }],
    }
}

fn measured_and_fitted(input: &ReportInput<'_>) -> Option<Figure> {
    let fit = input.fit?;
    let of = |kind: PartKind| Series {
        name: kind.name().to_owned(),
        basis: "measured, and estimated by the fit".to_owned(),
        points: fit
            .rows
            .iter()
            .filter(|row| row.kind == kind)
            .map(|row| {
                let layout = row.layout.map(|layout| format!("{layout:?}").to_lowercase());
                let context = row.context.map(|context| context.to_string());
                let label: Vec<String> =
                    [Some(kind.name().to_owned()), layout, context].into_iter().flatten().collect();
                Point {
                    label: Some(label.join(" ")),
                    x: Some(row.measured_ms),
                    y: row.fitted_ms,
                    basis: format!("{}; error {:+.1} %", row.origin.name(), row.error_percent),
                }
            })
            .collect(),
    };
    let mut series: Vec<Series> =
        [PartKind::Sliding, PartKind::Full, PartKind::Head].into_iter().map(of).collect();
    series.retain(|series| !series.points.is_empty());
    Some(Figure {
        id: "measured-estimated".into(),
        title: "Measured against estimated".into(),
        description: "The rows of the table that were fitted: measured milliseconds to the right, \
                      the fit's upwards. On the line they are equal."
            .into(),
        mark: Mark::Scatter,
        x: axis("measured", Unit::Milliseconds, false),
        y: axis("estimated", Unit::Milliseconds, false),
        series,
    })
}

fn alternatives(input: &ReportInput<'_>) -> Option<Figure> {
    let base = input.alternatives.first()?;
    let points = input.alternatives.iter().filter_map(|one| {
        let basis = match one.beyond {
            Some(true) => "estimated, outside of the rows",
            _ => ESTIMATED,
        };
        let difference = one.difference.map(|share| format!("; {:+.1} %", 100.0 * share));
        Some(bar(&one.name, one.step_ms?, &format!("{basis}{}", difference.unwrap_or_default())))
    });
    Some(Figure {
        id: "what-if".into(),
        title: "What if".into(),
        description: format!(
            "Estimated milliseconds of steps that differ from the base (context {}) in one thing \
             each.",
            base.choice.context
        ),
        mark: Mark::Bars,
        x: axis("alternative", Unit::Name, false),
        y: axis("estimated time", Unit::Milliseconds, false),
        series: vec![Series {
            name: "estimated".into(),
            basis: ESTIMATED.into(),
            points: points.collect(),
        }],
    })
}
