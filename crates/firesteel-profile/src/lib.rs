//! What a step costs: tables of layer times, steps composed of them, estimates, and the memory of a
//! model.
//!
//! Measured, published, imported and estimated numbers are told apart. What is not known is `None`,
//! never 0.
//!
//! # From times that were measured
//!
//! [`Table`] is a strict file of times of single layers on one device, the published ones of a
//! Galaxy S25 among them ([`Table::galaxy_s25`]). [`compose`] adds a step up from them and says of
//! every part whether it was measured, interpolated or extrapolated, and of the whole whether only
//! its time is right. [`compose_prompt`] composes prompts of layers that were measured with a
//! chunk's tokens. [`import_report`] reads what other tools say of a run ([`OperatorTimes`],
//! [`RunTimes`]), bounded and strict, and refuses the emulator's times.
//!
//! # From what a graph moves
//!
//! [`StepCost`] counts from a step's graph the bytes that cross the memory, those that operators
//! move, and operations: the terms of a roofline model, which are added up here. [`fit()`] finds
//! the device's rates for as many of them as the table's rows of one precision carry: of all sets
//! of terms the one that predicts rows best which are left out (leave-one-out cross-validation).
//! [`EstimatedStep`] is what follows. A [`Group`] is what a node is there for, by its tag; reports
//! of other tools have nothing but names, by which it is guessed there.
//!
//! # Memory and reports
//!
//! [`memory`] counts weights and the contract's caches, and splits a model into graphs of at most 2
//! GiB, which is what a Hexagon session can address. A [`Document`] is what a report plots, and
//! [`html`] its page, without scripts or anything that is loaded.

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
    ContextMemory, GRAPH_LIMIT, GraphPart, KvElement, Memory, MemoryPlan, MemoryRequest, memory,
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
