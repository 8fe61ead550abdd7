//! What a step costs; one file each.

mod compose;
mod import;
mod measure;
mod memory;
mod phone_kit;
mod row;

use crate::printer::Printer;
use clap::{Args, Subcommand};
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
    /// Bytes of weights and caches, and the graphs that a Hexagon session can hold.
    Memory(memory::MemoryCommand),
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
            What::Memory(command) => command.run(printer),
            What::Import(command) => command.run(printer),
            What::Measure(command) => command.run(printer),
            What::PhoneKit(command) => command.run(printer),
        }
    }
}
