//! What a step costs; one file each.

mod compose;
mod estimate;
mod import;
mod measure;
mod memory;
mod phone_kit;
mod report;
mod row;

use crate::printer::Printer;
use crate::texts::read_text;
use clap::{Args, Subcommand};
use firesteel_profile::Table;
use std::path::Path;
use std::process::ExitCode;

/// Tell what a step costs on a device, without the device.
#[derive(Debug, Args)]
pub(crate) struct Profile {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The time of a step, added up from a table of measured layers.
    Compose(compose::Compose),
    /// The time of a step that nobody has measured, from its graph and a device's measured layers.
    Estimate(estimate::EstimateCommand),
    /// Bytes of weights and caches, and the graphs that a Hexagon session can hold.
    Memory(memory::MemoryCommand),
    /// A page with plots: memory and time against the context, time by group, the fit's error.
    Report(report::ReportCommand),
    /// Read what another tool reports of a run on a device.
    Import(import::Import),
    /// Time the step of an artifact or a checkpoint on this machine.
    Measure(measure::Measure),
    /// Write what is needed to run an artifact on a device, without this program.
    PhoneKit(phone_kit::PhoneKit),
}

impl Profile {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        match self.what {
            What::Compose(command) => command.run(printer),
            What::Estimate(command) => command.run(printer),
            What::Memory(command) => command.run(printer),
            What::Report(command) => command.run(printer),
            What::Import(command) => command.run(printer),
            What::Measure(command) => command.run(printer),
            What::PhoneKit(command) => command.run(printer),
        }
    }
}

/// A table of layer times; without a file the published ones of a Galaxy S25.
fn read_table(file: Option<&Path>) -> anyhow::Result<Table> {
    Ok(match file {
        Some(path) => Table::from_json(path, read_text(path)?.as_bytes())?,
        None => Table::galaxy_s25()?,
    })
}
