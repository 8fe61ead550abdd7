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
        marks: &["error code: 30010", "Error code: 30010", "0x753a", "0x753A"],
        causes: "the HTP refuses the graph while it is prepared: its operators fit one by one, but \
                 not together, or its memory does not suffice",
        next: "compile fewer layers at once (--split), and read the log's line before this code",
    },
    Diagnosis {
        code: "14001",
        marks: &["error code: 14001", "Error code: 14001", "0x36b1", "QNN_DEVICE_ERROR"],
        causes: "the device cannot be opened: no driver, no permission, or a library of another \
                 version than the device's",
        next: "on a phone: use the libraries of the same SDK that the manifest names; on a PC: run \
               `firesteel setup qnn --force`",
    },
    Diagnosis {
        code: "6031",
        marks: &["error code: 6031", "Error code: 6031", "0x178f"],
        causes: "an operator's parameter or tensor is not one that the back end takes: a type, a \
                 rank or an encoding",
        next: "find the operator in the log's line before it and compare its types with the \
               operator tables of the SDK",
    },
    Diagnosis {
        code: "6001",
        marks: &[
            "error code: 6001",
            "Error code: 6001",
            "0x1771",
            "QNN_GRAPH_ERROR_INVALID_HANDLE",
        ],
        causes: "a graph handle is not valid: the context was freed, or its graph was not made",
        next: "look for the first error in the log; this one follows from it",
    },
    Diagnosis {
        code: "5005",
        marks: &[
            "error code: 5005",
            "Error code: 5005",
            "0x138d",
            "QNN_CONTEXT_ERROR_CREATE_FROM_BINARY",
        ],
        causes: "the context binary cannot be read: damaged, cut off, or of a newer SDK or another \
                 chip",
        next: "run `firesteel inspect --verify` on the folder, then compile it again",
    },
    Diagnosis {
        code: "3110",
        marks: &["error code: 3110", "Error code: 3110", "0xc26"],
        causes: "an operator is not supported in these types by the HTP",
        next: "see which operator the log names; the qnn dialect of `export` has the spellings that \
               are",
    },
    Diagnosis {
        code: "1002",
        marks: &["error code: 1002", "Error code: 1002", "err 1002", "0x3ea"],
        causes: "memory could not be had, on the host or in the device's address space",
        next: "free memory or raise --memory-limit; on a device, split the model (--split)",
    },
    Diagnosis {
        code: "1100",
        marks: &["error code: 1100", "Error code: 1100", "0x44c"],
        causes: "a system call failed: a file, a mapping or the channel to the device",
        next: "check free space and permissions of the working folder",
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
    TABLE.iter().filter(|entry| entry.marks.iter().any(|mark| text.contains(mark))).collect()
}
