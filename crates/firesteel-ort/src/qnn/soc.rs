use crate::OrtError;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A system on a chip that can be compiled for.
///
/// The provider takes any pair of chip and architecture without a word and the chip wins, so a
/// chip is named, never put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Soc {
    /// Qualcomm's name in lower case, such as `sm8750`.
    pub name: &'static str,
    /// Qualcomm's number, which the binary carries.
    pub number: u32,
    /// Version of the Hexagon architecture.
    pub arch: u32,
    /// Market name.
    pub title: &'static str,
    /// A phone that has it.
    pub phone: &'static str,
}

/// The chips whose binaries carry their own name, as [`QNN_SDK_VERSION`](crate::QNN_SDK_VERSION)
/// writes them. For others the compiler takes the number and writes a binary for another chip.
pub const SOCS: [Soc; 5] = [
    soc("sm8450", 36, 69, "Snapdragon 8 Gen 1", "Galaxy S22"),
    soc("sm8550", 43, 73, "Snapdragon 8 Gen 2", "Galaxy S23"),
    soc("sm8650", 57, 75, "Snapdragon 8 Gen 3", "Galaxy S24"),
    soc("sm8750", 69, 79, "Snapdragon 8 Elite", "Galaxy S25"),
    soc("sm8850", 87, 81, "Snapdragon 8 Elite Gen 5", "Xiaomi 17"),
];

const fn soc(
    name: &'static str,
    number: u32,
    arch: u32,
    title: &'static str,
    phone: &'static str,
) -> Soc {
    Soc { name, number, arch, title, phone }
}

impl Soc {
    /// The chip of that name, in any case.
    ///
    /// # Errors
    /// When it is not known; the message has the table.
    pub fn find(name: &str) -> Result<Self, OrtError> {
        let known = SOCS.into_iter().find(|soc| soc.name.eq_ignore_ascii_case(name));
        known.ok_or_else(|| OrtError::Soc { name: name.to_owned() })
    }
}

impl fmt::Display for Soc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, number, arch, title, phone } = self;
        write!(f, "{name} (number {number}, v{arch}, {title}, such as the {phone})")
    }
}

/// How fast and hungry the device is asked to be while it runs a context. The binary is the same;
/// a host gives this to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Performance {
    /// The clocks that the system chooses.
    #[default]
    Default,
    /// The highest clocks, all the time.
    Burst,
    /// High clocks, for long work.
    SustainedHighPerformance,
    /// High clocks.
    HighPerformance,
    /// Less than that.
    Balanced,
    /// Low clocks.
    PowerSaver,
}

impl Performance {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Default,
        Self::Burst,
        Self::SustainedHighPerformance,
        Self::HighPerformance,
        Self::Balanced,
        Self::PowerSaver,
    ];

    /// The provider's word for it, for its option `htp_performance_mode`.
    pub const fn option(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Burst => "burst",
            Self::SustainedHighPerformance => "sustained_high_performance",
            Self::HighPerformance => "high_performance",
            Self::Balanced => "balanced",
            Self::PowerSaver => "power_saver",
        }
    }
}
