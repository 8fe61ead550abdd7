//! What a step costs: tables of layer times, steps composed of them, and the memory of a model.
//!
//! [`Table`] is a file of times of single layers on one device, the published ones of a Galaxy S25
//! among them ([`Table::galaxy_s25`]). [`compose`] adds a step up from them and says of every part
//! whether it was measured, interpolated or extrapolated. [`memory`] counts weights and caches,
//! and splits a model into graphs that a Hexagon session can address. What is not known is `None`,
//! never 0.

mod compose;
mod error;
mod estimate;
mod fit;
mod groups;
mod import;
mod memory;
mod operators;
mod report;
mod report_html;
mod table;
mod times;
mod traffic;
mod vtcm;
mod weights;

pub use compose::{
    Basis, BreakEven, ComposedPrompt, ComposedStep, Composition, PartTime, Prompt, Selection,
    compose, compose_prompt,
};
pub use error::ProfileError;
pub use estimate::{
    Alternative, CacheMoves, Estimate, EstimatedPart, EstimatedStep, GroupTime, LargestOperator,
    PartCost, StepChoice, StepCost, WhatIf, cache_moves, what_if,
};
pub use fit::{Fit, FitSelection, FittedRow, Term, TermFit, fit};
pub use groups::{Group, GroupShare, Grouped};
pub use import::{ImportedReport, REPORT_LIMIT, ReportFormat, import_report};
pub use memory::{
    ContextMemory, GRAPH_LIMIT, GraphPart, KvElement, Memory, MemoryRequest, Plan, memory,
};
pub use operators::{OperatorTime, OperatorTimes, Provenance, Quantity};
pub use report::{Axis, Document, Figure, Mark, Point, ReportInput, Series, Unit};
pub use report_html::html;
pub use table::{LayerShape, Measurement, Origin, PartKind, Source, Statistic, Table};
pub use times::RunTimes;
pub use traffic::{
    Cost, ElementBits, NodeCost, count_graph, largest_working_set, peak_activations,
};
pub use vtcm::{CompiledGraph, SessionGraph, VTCM_BYTES};
pub use weights::{ModelBytes, WeightCoding, WeightCount};
