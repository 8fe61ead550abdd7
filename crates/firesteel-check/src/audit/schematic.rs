use super::{AuditError, Dump};
use firesteel_graph::{Graph, Node, Part, Tag};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// Bytes that operators of the device move, as the compiler planned them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Operators of the device.
    pub htp_ops: u64,
    /// Bytes read from memory.
    pub dram_read: u64,
    /// Bytes written to memory.
    pub dram_write: u64,
    /// Bytes read from the tightly coupled memory.
    pub vtcm_read: u64,
    /// Bytes written to the tightly coupled memory.
    pub vtcm_write: u64,
}

impl Traffic {
    /// Adds what others move.
    pub fn add(&mut self, other: Self) {
        for (own, more) in [
            (&mut self.htp_ops, other.htp_ops),
            (&mut self.dram_read, other.dram_read),
            (&mut self.dram_write, other.dram_write),
            (&mut self.vtcm_read, other.vtcm_read),
            (&mut self.vtcm_write, other.vtcm_write),
        ] {
            *own = own.saturating_add(more);
        }
    }
}

/// The traffic of one node of the source graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTraffic {
    /// Name of the node; `(border)` for what belongs to the graph's inputs and outputs.
    pub node: String,
    /// What it is there for; of an operator that the provider put in, what makes its input. `None`
    /// where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Tag>,
    /// The operator, as the graph has it, or as QNN has it where the provider put it in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// What its operators move.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// The compiler's account of a graph for the device. All of it is planned, none is measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schematic {
    /// The whole graph.
    pub total: Traffic,
    /// Each node of the source graph, by name.
    pub nodes: Vec<NodeTraffic>,
    /// Bytes of the tightly coupled memory up to the end of the highest block in it; `None` when
    /// the compiler does not say where its blocks are.
    #[serde(default)]
    pub vtcm_bytes: Option<u64>,
    /// Bytes of values between operators that lie in memory instead, each counted once; `None`
    /// when the compiler does not list its values.
    #[serde(default)]
    pub memory_values_bytes: Option<u64>,
}

/// Name for operators that belong to no node of the source.
const BORDER: &str = "(border)";

/// The low half of an operator's number is that of the node it was made from.
const SOURCE_MASK: u64 = 0xffff_ffff;

impl Schematic {
    /// Reads the text that the compiler writes with its trace option: the graph after
    /// optimization, the bytes each operator moves, and the names of the source nodes.
    ///
    /// # Errors
    /// When a section is missing or a line is not of the known form.
    pub fn parse(text: &str) -> Result<Self, AuditError> {
        #[derive(PartialEq)]
        enum Section {
            Other,
            Graph,
            Bandwidth,
            Names,
            Values,
            Blocks,
        }
        let mut section = Section::Other;
        let mut seen = [false; 3];
        let mut traffic: HashMap<u64, Traffic> = HashMap::new();
        let mut names: HashMap<u64, String> = HashMap::new();
        let mut id = None;
        let (mut vtcm_bytes, mut memory_values_bytes) = (None::<u64>, None::<u64>);
        for (number, line) in text.lines().enumerate() {
            let fail = |problem: &str| AuditError::Schematic {
                line: number + 1,
                problem: format!("{problem}: {:.80}", line.trim()),
            };
            let start = |name: &str| line.starts_with(name);
            if start("graph_after_optimization = {") {
                (section, seen[0]) = (Section::Graph, true);
            } else if start("bandwidth_information") {
                (section, seen[1]) = (Section::Bandwidth, true);
            } else if start("qnn_name_translations") {
                (section, seen[2]) = (Section::Names, true);
            } else if start("memgroup_map = {") {
                (section, memory_values_bytes) = (Section::Values, Some(0));
            } else if start("tcm_block_info = {") {
                (section, vtcm_bytes) = (Section::Blocks, Some(0));
            } else if start("}") || start("]") || start("# :::END") {
                section = Section::Other;
            } else if section == Section::Graph {
                let line = line.trim();
                if let Some(hex) = line.strip_prefix("0x").and_then(|l| l.strip_suffix(": {")) {
                    id = Some(u64::from_str_radix(hex, 16).map_err(|_| fail("no number"))?);
                } else if let Some(operation) = line.strip_prefix("'operation':'") {
                    let id = id.take().ok_or_else(|| fail("an operator without number"))?;
                    // Constants and shapes are values, not work.
                    if !operation.starts_with('$') {
                        let one = Traffic { htp_ops: 1, ..Traffic::default() };
                        traffic.entry(id & SOURCE_MASK).or_default().add(one);
                    }
                }
            } else if section == Section::Bandwidth && line.starts_with('{') {
                let (id, moved) = bandwidth(line).ok_or_else(|| fail("unknown fields"))?;
                traffic.entry(id & SOURCE_MASK).or_default().add(moved);
            } else if section == Section::Names && line.starts_with("0x") {
                let entry = line.strip_prefix("0x").and_then(|line| {
                    let (hex, name) = line.split_once(": '")?;
                    Some((u64::from_str_radix(hex, 16).ok()?, name.strip_suffix("',")?))
                });
                let (id, name) = entry.ok_or_else(|| fail("no name"))?;
                names.insert(id & SOURCE_MASK, name.to_owned());
            } else if section == Section::Values && line.trim_start().starts_with("'mg") {
                let bytes = value_in_memory(line).ok_or_else(|| fail("no size"))?;
                memory_values_bytes = memory_values_bytes.map(|sum| sum.saturating_add(bytes));
            } else if section == Section::Blocks && line.contains(": (") {
                let end = block_end(line).ok_or_else(|| fail("no block"))?;
                vtcm_bytes = vtcm_bytes.map(|highest| highest.max(end));
            }
        }
        for (found, name) in
            seen.into_iter().zip(["graph_after_optimization", "bandwidth_information", "names"])
        {
            if !found {
                let problem = format!("there is no section {name}");
                return Err(AuditError::Schematic { line: text.lines().count(), problem });
            }
        }
        let mut total = Traffic::default();
        let mut by_name: BTreeMap<String, Traffic> = BTreeMap::new();
        for (id, moved) in traffic {
            total.add(moved);
            let name = names.get(&id).map_or(BORDER, String::as_str);
            by_name.entry(name.to_owned()).or_default().add(moved);
        }
        let nodes = by_name.into_iter().map(|(node, traffic)| NodeTraffic {
            node,
            tag: None,
            operator: None,
            traffic,
        });
        Ok(Self { total, nodes: nodes.collect(), vtcm_bytes, memory_values_bytes })
    }

    /// Says of each node what it is there for in `graph`, of which QNN was given `dump`.
    pub(super) fn tagged(mut self, graph: &Graph, dump: &Dump) -> Self {
        let known: HashMap<&str, &Node> =
            graph.nodes().iter().map(|node| (node.name.as_str(), node)).collect();
        for node in &mut self.nodes {
            if let Some(meant) = known.get(node.node.as_str()) {
                node.tag = meant.tag;
                node.operator = Some(meant.op.name().to_owned());
            } else if let Some(op) = dump.nodes.get(&node.node) {
                let mut values = op.inputs.iter().chain(&op.outputs);
                let made = |name: &String| graph.producer(graph.find(name)?)?.tag;
                node.tag = values.find_map(made);
                node.operator = Some(op.kind.clone());
            } else if node.node == BORDER {
                node.tag = Some(Tag { layer: None, part: Part::Border });
            }
        }
        self
    }
}

/// Bytes of a line such as `'mg00001': memgroup(bytes=2048, is_tcm=True, gen_op = '#1',`, 0 for a
/// value in the tightly coupled memory.
fn value_in_memory(line: &str) -> Option<u64> {
    let mut fields = line.split_once("memgroup(bytes=")?.1.split(", ");
    let bytes = fields.next()?.parse().ok()?;
    match fields.next()?.strip_prefix("is_tcm=")? {
        "True" => Some(0),
        "False" => Some(bytes),
        _ => None,
    }
}

/// The end of a block such as `145: (0x1b7000, 0x80),`.
fn block_end(line: &str) -> Option<u64> {
    let (start, size) = line.split_once(": (0x")?.1.split_once(')')?.0.split_once(", 0x")?;
    u64::from_str_radix(start, 16).ok()?.checked_add(u64::from_str_radix(size, 16).ok()?)
}

/// A line such as `{"opid" : 0x0000501400000146 , "dram_read": 8192 , …, "is_dma": 1},`.
fn bandwidth(line: &str) -> Option<(u64, Traffic)> {
    let body = line.trim().trim_end_matches(',').strip_prefix('{')?.strip_suffix('}')?;
    let (mut id, mut traffic) = (None, Traffic::default());
    for field in body.split(',') {
        let (name, value) = field.split_once(':')?;
        let value = value.trim();
        match name.trim().trim_matches('"') {
            "opid" => id = Some(u64::from_str_radix(value.strip_prefix("0x")?, 16).ok()?),
            "dram_read" => traffic.dram_read = value.parse().ok()?,
            "dram_write" => traffic.dram_write = value.parse().ok()?,
            "vtcm_read" => traffic.vtcm_read = value.parse().ok()?,
            "vtcm_write" => traffic.vtcm_write = value.parse().ok()?,
            _ => {}
        }
    }
    Some((id?, traffic))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
graph_before_optimization = { # :::BEGIN:graph_before_optimization:::
\t0x0000000000000010: {
\t\t'operation':'q::QNN_Reshape',
}
graph_after_optimization = { # :::BEGIN:graph_after_optimization:::
\t0x0000501400000010: {
\t\t'operation':'q::*InputSlicePad',
\t},
\t0x0000501500000010: {
\t\t'operation':'$Const',
\t},
\t0x0000501600000099: {
\t\t'operation':'q::Output',
\t},
# :::END:graph_after_optimization:::
bandwidth_information = [
{\"opid\" : 0x0000501400000010 , \"dram_read\": 8192 , \"dram_write\": 1 , \"vtcm_read\": 2 , \"vtcm_write\": 3, \"is_dma\": 1},
{\"opid\" : 0x0000501600000099 , \"dram_read\": 0 , \"dram_write\": 64 , \"vtcm_read\": 64 , \"vtcm_write\": 0, \"is_dma\": 0},
]
qnn_name_translations = {
0x0000000000000010: 'x_rows/Reshape',
}
memgroup_map = { #Number of groups = 3
 'mg00001': memgroup(bytes=2048, is_tcm=True, gen_op = '#1',
          blocks = interval_set(1,[0x91]),
  ),
 'mg00002': memgroup(bytes=512, is_tcm=False, gen_op = '#83',
  ),
 'mg00003': memgroup(bytes=256, is_tcm=False, gen_op = '#89',
  ),
# ---- > total 2816 bytes in 3 blocks, in 3 groups
}
tcm_block_info = {
    145: (0x1b7000, 0x80),
    146: (0x1000, 0x800),
} # end of block_info
";

    #[test]
    fn traffic_goes_to_the_node_that_it_comes_from() {
        let schematic = Schematic::parse(TEXT).unwrap();
        let node = |htp_ops, dram_read, dram_write, vtcm_read, vtcm_write| Traffic {
            htp_ops,
            dram_read,
            dram_write,
            vtcm_read,
            vtcm_write,
        };
        assert_eq!(schematic.total, node(2, 8192, 65, 66, 3));
        let nodes: Vec<(&str, Traffic)> =
            schematic.nodes.iter().map(|n| (n.node.as_str(), n.traffic)).collect();
        assert_eq!(
            nodes,
            [("(border)", node(1, 0, 64, 64, 0)), ("x_rows/Reshape", node(1, 8192, 1, 2, 3))]
        );
        assert_eq!(schematic.vtcm_bytes, Some(0x001b_7080));
        assert_eq!(schematic.memory_values_bytes, Some(768));
        // Other versions of the compiler may say nothing of these.
        let text = TEXT.split("memgroup_map").next().unwrap();
        let schematic = Schematic::parse(text).unwrap();
        assert_eq!((schematic.vtcm_bytes, schematic.memory_values_bytes), (None, None));
    }

    #[test]
    fn other_texts_are_refused_by_line() {
        for (text, part) in [
            (String::new(), "no section graph_after_optimization"),
            (TEXT.replace("bandwidth_information", "b"), "no section bandwidth_information"),
            (TEXT.replace("0x0000501400000010: {", "0xzz: {"), "line 6: no number"),
            (TEXT.replace(": 8192", ": -1"), "line 17: unknown fields"),
            (TEXT.replace("{\"opid\" : 0x0000501400000010 ,", "{"), "line 17: unknown fields"),
            (TEXT.replace("'x_rows/Reshape'", "x"), "no name"),
            (TEXT.replace("bytes=512", "bytes=x"), "line 27: no size"),
            (TEXT.replace("is_tcm=False", "is_tcm=No"), "line 27: no size"),
            (TEXT.replace("0x80)", "0x80"), "line 34: no block"),
            (TEXT.replace("0x80)", "0xffffffffffffffff)"), "line 34: no block"),
        ] {
            let error = Schematic::parse(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
