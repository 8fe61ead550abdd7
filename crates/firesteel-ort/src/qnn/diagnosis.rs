use std::fmt;

/// What a code or line of Qualcomm's libraries means, and what to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The code, or a name for the kind of failure.
    pub code: &'static str,
    /// Texts of which one is in the message or log.
    marks: &'static [&'static str],
    /// What it means, and the likely causes.
    pub causes: &'static str,
    /// What to do next.
    pub next: &'static str,
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.code, self.causes, self.next)
    }
}

/// The known failures, the ones that say most first.
const DIAGNOSES: [Diagnosis; 14] = [
    Diagnosis {
        code: "INVALID_CONFIG",
        marks: &["QNN_DEVICE_ERROR_INVALID_CONFIG", "Invalid config values"],
        causes: "the compiler does not know the chip's number or architecture",
        next: "give --soc one of the names that `firesteel compile --help` lists",
    },
    Diagnosis {
        code: "context file exists",
        marks: &["exists already", "already exist"],
        causes: "a context file of this name is in the way, which the provider never replaces",
        next: "remove the file, or write to another folder",
    },
    Diagnosis {
        code: "30010",
        marks: &["error code: 30010", "Error code: 30010", "Error code 30010", "0x753a"],
        causes: "the file cannot be read as a context binary at all: it is another file, cut off, or of a newer SDK",
        next: "run `firesteel inspect --verify` on the folder; if its files are whole, compile again with the SDK that reads it",
    },
    Diagnosis {
        code: "14001",
        marks: &["error code: 14001", "Error code: 14001", "0x36b1", "Error: 14001"],
        causes: "the device cannot be opened with its configuration: an unknown chip, or on a phone a Skel library that is not the SDK's or not on ADSP_LIBRARY_PATH",
        next: "on a phone: put libQnnHtp, Stub and Skel of the SDK that the manifest names side by side; on a PC: check --soc",
    },
    Diagnosis {
        code: "6031",
        marks: &["error code: 6031", "Error code: 6031", "0x178f", "QNN_GRAPH_ERROR_ABORTED"],
        causes: "the run was ended from outside: a signal, a timeout, or a restart of the device's subsystem",
        next: "open the session again; if it comes back, look for the device's crash in its log",
    },
    Diagnosis {
        code: "6001",
        marks: &[
            "error code: 6001",
            "Error code: 6001",
            "0x1771",
            "QNN_GRAPH_ERROR_INVALID_HANDLE",
        ],
        causes: "a graph handle is not valid: its context was freed or lost with a restart of the device, or its graph was never made",
        next: "look for the first error in the log, which this one follows; open the session again",
    },
    Diagnosis {
        code: "5005",
        marks: &[
            "error code: 5005",
            "Error code: 5005",
            "0x138d",
            "QNN_CONTEXT_ERROR_CREATE_FROM_BINARY",
        ],
        causes: "no context could be made from the binary: it is for another chip, of a newer SDK, damaged, or the device has no memory for it",
        next: "compare chip and SDK with the manifest, run `firesteel inspect --verify`, and try fewer layers at once (--split)",
    },
    Diagnosis {
        code: "3110",
        marks: &[
            "error code: 3110",
            "Error code: 3110",
            "0xc26",
            "QNN_OP_PACKAGE_ERROR_VALIDATION_FAILURE",
        ],
        causes: "an operator was refused in these types, shapes or parameters",
        next: "see which operator the log names; `export --dialect qnn` has the spellings that are taken",
    },
    Diagnosis {
        code: "1002",
        marks: &[
            "error code: 1002",
            "Error code: 1002",
            "err 1002",
            "0x3ea",
            "QNN_COMMON_ERROR_MEM_ALLOC",
        ],
        causes: "memory could not be had, or an operator of the device could not be made: while a graph is finalized both have this code",
        next: "read the log's line before it; free memory or raise --memory-limit, or compile fewer layers at once (--split)",
    },
    Diagnosis {
        code: "1100",
        marks: &["error code: 1100", "Error code: 1100", "0x44c"],
        causes: "a general failure without a kind of its own",
        next: "read the log's lines before it, which have the cause",
    },
    Diagnosis {
        code: "binary refused",
        marks: &[
            "Failed to get context binary info",
            "Failed to create context from binary",
            "contextCreateFromBinary",
            "Failed to get valid QNN system context",
        ],
        causes: "the context binary is damaged, or was written by another SDK than this one",
        next: "run `firesteel inspect --verify` on the folder; if its files are whole, compile again \
               with the installed version",
    },
    Diagnosis {
        code: "compose failed",
        marks: &["Failed to compose Qnn graph", "composeGraph", "Failed to finalize QNN graph"],
        causes: "the compiler took the operators one by one and refuses the graph: shapes beyond \
                 its limits, or a pair of types that it has no kernel for",
        next: "compile a slice (`export --layers A:B`) to find the layer, then read the log's line \
               before this one",
    },
    Diagnosis {
        code: "back end missing",
        marks: &["Unable to load backend", "Could not determine default backend path"],
        causes: "the HTP library cannot be loaded",
        next: "run `firesteel setup qnn --force`",
    },
    Diagnosis {
        code: "CPU placement",
        marks: &["assigned to the default CPU EP"],
        causes: "the HTP does not take every operator of the graph in its types",
        next: "export with --dialect qnn and --precision fp16, or quantize; the nodes are named \
               where they are known",
    },
];

/// What is known about a failure, from its message and log: the entries of which a mark is in
/// `text`, the ones that say most first.
pub fn diagnose(text: &str) -> Vec<&'static Diagnosis> {
    static TABLE: &[Diagnosis] = &DIAGNOSES;
    TABLE.iter().filter(|entry| entry.marks.iter().any(|mark| contains(text, mark))).collect()
}

/// Whether `mark` is in `text`; one that is a number only where the number ends.
fn contains(text: &str, mark: &str) -> bool {
    let number = mark.starts_with("0x") || mark.ends_with(|c: char| c.is_ascii_digit());
    text.match_indices(mark).any(|(start, _)| {
        let after = text.get(start + mark.len()..).and_then(|rest| rest.chars().next());
        !number || after.is_none_or(|c| !c.is_ascii_alphanumeric())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_in_every_spelling_and_only_there() {
        for (text, code) in [
            ("QNN graph execute error. Error code: 6031", "6031"),
            ("Failed to create context from binary with err 0x138d", "5005"),
            ("Failed to finalize graph (id: 1) with err 1002", "1002"),
            ("QNN_OP_PACKAGE_ERROR_VALIDATION_FAILURE", "3110"),
            ("Failed to interpret QNN context binary. Error code 30010.", "30010"),
            ("Failed to create device. Error: 14001", "14001"),
            ("Error: QNN_DEVICE_ERROR_INVALID_CONFIG: Invalid config values", "INVALID_CONFIG"),
            ("returned error code: 1100", "1100"),
            ("QNN graph execute error. Error code: 6001", "6001"),
            ("Failed to compose Qnn graph", "compose failed"),
        ] {
            let found = diagnose(text);
            assert_eq!(found.first().map(|entry| entry.code), Some(code), "{text}");
            assert!(found[0].to_string().starts_with(code), "{text}");
        }
        for text in ["16001 bytes in 14001 pieces", "at 0xc26f00", "err 10020"] {
            assert_eq!(diagnose(text), Vec::<&Diagnosis>::new(), "{text}");
        }
        assert_eq!(diagnose(""), Vec::<&Diagnosis>::new());
    }
}
