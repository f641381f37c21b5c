use super::*;
use crate::fetch::{Base, Fetched, Memory, Pointer, Read};

#[test]
fn a_detour_reads_memory_by_calls_of_the_kernels_own_code() {
    let reader = |at: u64| [0, 1, 2, 3].map(|size| Gva(at + 0x40 * size));
    let pointer = |offset, memory| Pointer { offset, memory };
    let mut capture = Capture {
        registers: RegisterSet::from_iter([]),
        fetching: Some(Fetching {
            readers: Readers {
                kernel: reader(0xffff_ffff_81a0_0010),
                process: reader(0xffff_ffff_81a0_0000),
                kernel_half: Gva(0xffff_8000_0000_0000),
                process_end: Gva(0x7fff_ffff_f000),
                current: 0x1_fbc0,
                disabled: 0x9b8,
            },
            items: vec![Fetched {
                base: Base::Register(Gpr::Rdi),
                pointers: vec![pointer(8, Memory::Kernel), pointer(0, Memory::Kernel)],
                read: Read::Bytes(4),
            }],
        }),
        ..Capture::default()
    };
    let span = span("0f1f440000");
    let made = |capture: &Capture| {
        let member = Member {
            conditions: &[],
            vetoed: VETOED,
            part: record(capture),
        };
        let recorder = Recorder::new(&span, &RING, &[member]).unwrap();
        let detour = recorder.place(DETOUR).unwrap();
        assert!(detour.escape().is_some());
        text(detour.code(), DETOUR)
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 pushfq
        80040006 bt dword ptr [rsp],12h
        8004000b jb 0FFFFFFFF80040126h
        80040011 mov rax,gs:[1FBC0h]
        8004001a cmp dword ptr [rax+9B8h],1
        80040021 ja 0FFFFFFFF80040126h
        80040027 rdtsc
        80040029 shl rdx,20h
        8004002d lea r11,[rax+rdx]
        80040031 mov rax,[0FFFFFFFF80100000h]
        80040039 lea rcx,[rax+1]
        8004003d cmp rcx,[0FFFFFFFF80100040h]
        80040045 ja 0FFFFFFFF80040134h
        8004004b lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040055 jne short 0FFFFFFFF80040039h
        80040057 and eax,3FFh
        8004005c shl eax,6
        8004005f mov [rax-7FEFEFF8h],r11
        80040066 lea r11,[rax-7FEFF000h]
        8004006d mov eax,[rsp]
        80040070 mov [r11+14h],eax
        80040074 mov qword ptr [r11+18h],0
        8004007c mov rax,gs:[1FBC0h]
        80040085 inc dword ptr [rax+9B8h]
        8004008b mov rax,rdi
        8004008e add rax,8
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae 0FFFFFFFF80040143h
        800400a7 cmp rax,0FFFFFFFFFFFFE000h
        800400ad ja 0FFFFFFFF80040143h
        800400b3 call 0FFFFFFFF81A000D0h
        800400b8 test eax,eax
        800400ba jne 0FFFFFFFF80040143h
        800400c0 mov rax,rdx
        800400c3 mov rdx,800000000000h
        800400cd add rdx,rax
        800400d0 jae short 0FFFFFFFF80040143h
        800400d2 cmp rax,0FFFFFFFFFFFFE000h
        800400d8 ja short 0FFFFFFFF80040143h
        800400da call 0FFFFFFFF81A00090h
        800400df test eax,eax
        800400e1 jne short 0FFFFFFFF80040143h
        800400e3 mov [r11+20h],edx
        800400e7 mov rax,gs:[1FBC0h]
        800400f0 dec dword ptr [rax+9B8h]
        800400f6 mov [r11],ecx
        800400f9 mov dword ptr [r11+4],1000009h
        80040101 sub rcx,[0FFFFFFFF80100048h]
        80040109 cmp rcx,1
        8004010d jb short 0FFFFFFFF8004013Fh
        8004010f pop rax
        80040110 xchg al,ah
        80040112 and al,8
        80040114 add al,78h
        80040116 sahf
        80040117 pop r11
        80040119 pop rdx
        8004011a pop rcx
        8004011b pop rax
        8004011c nop [rax+rax]
        80040121 jmp 0FFFFFFFF81234565h
        80040126 pop rax
        80040127 xchg al,ah
        80040129 and al,8
        8004012b add al,78h
        8004012d sahf
        8004012e pop r11
        80040130 pop rdx
        80040131 pop rcx
        80040132 pop rax
        80040133 int3
        80040134 lock inc qword ptr [0FFFFFFFF80100080h]
        8004013d jmp short 0FFFFFFFF8004010Fh
        8004013f out 5Eh,al
        80040141 jmp short 0FFFFFFFF8004010Fh
        80040143 or dword ptr [r11+18h],1
        80040148 jmp short 0FFFFFFFF800400E7h
    "#]]
    .assert_eq(&made(&capture));
    let fetching = capture.fetching.as_mut().unwrap();
    fetching.items[0] = Fetched {
        base: Base::Register(Gpr::Rsi),
        pointers: vec![pointer(0, Memory::Either)],
        read: Read::Text(100),
    };
    expect![[r#"
        80040000 push rax
        80040001 push rcx
        80040002 push rdx
        80040003 push r11
        80040005 push rsi
        80040006 push rdi
        80040007 push r8
        80040009 pushfq
        8004000a bt dword ptr [rsp],12h
        8004000f jb 0FFFFFFFF80040300h
        80040015 mov rax,gs:[1FBC0h]
        8004001e cmp dword ptr [rax+9B8h],1
        80040025 ja 0FFFFFFFF80040300h
        8004002b rdtsc
        8004002d shl rdx,20h
        80040031 lea r11,[rax+rdx]
        80040035 mov rax,[0FFFFFFFF80100000h]
        8004003d lea rcx,[rax+3]
        80040041 cmp rcx,[0FFFFFFFF80100040h]
        80040049 ja 0FFFFFFFF80040312h
        8004004f lock cmpxchg [0FFFFFFFF80100000h],rcx
        80040059 jne short 0FFFFFFFF8004003Dh
        8004005b and eax,3FFh
        80040060 shl eax,6
        80040063 mov [rax-7FEFEFF8h],r11
        8004006a lea r11,[rax-7FEFF000h]
        80040071 mov eax,[rsp]
        80040074 mov [r11+14h],eax
        80040078 mov qword ptr [r11+18h],0
        80040080 mov rax,gs:[1FBC0h]
        80040089 inc dword ptr [rax+9B8h]
        8004008f mov rax,[rsp+18h]
        80040094 mov rdx,800000000000h
        8004009e add rdx,rax
        800400a1 jae 0FFFFFFFF800401B1h
        800400a7 cmp rax,0FFFFFFFFFFFFE000h
        800400ad ja 0FFFFFFFF800401B1h
        800400b3 mov rsi,rax
        800400b6 mov rdi,0FEFEFEFEFEFEFEFFh
        800400c0 mov r8,8080808080808080h
        800400ca call 0FFFFFFFF81A000D0h
        800400cf mov [r11+20h],rdx
        800400d3 add rdx,rdi
        800400d6 test rdx,r8
        800400d9 jne 0FFFFFFFF80040321h
        800400df lea rax,[rsi+8]
        800400e3 call 0FFFFFFFF81A000D0h
        800400e8 mov [r11+28h],rdx
        800400ec add rdx,rdi
        800400ef test rdx,r8
        800400f2 jne 0FFFFFFFF8004034Ch
        800400f8 lea rax,[rsi+10h]
        800400fc call 0FFFFFFFF81A000D0h
        80040101 mov [r11+30h],rdx
        80040105 add rdx,rdi
        80040108 test rdx,r8
        8004010b jne 0FFFFFFFF8004037Bh
        80040111 lea rax,[rsi+18h]
        80040115 call 0FFFFFFFF81A000D0h
        8004011a mov [r11+38h],rdx
        8004011e add rdx,rdi
        80040121 test rdx,r8
        80040124 jne 0FFFFFFFF800403AAh
        8004012a lea rax,[rsi+20h]
        8004012e call 0FFFFFFFF81A000D0h
        80040133 mov [r11+48h],rdx
        80040137 add rdx,rdi
        8004013a test rdx,r8
        8004013d jne 0FFFFFFFF800403D9h
        80040143 lea rax,[rsi+28h]
        80040147 call 0FFFFFFFF81A000D0h
        8004014c mov [r11+50h],rdx
        80040150 add rdx,rdi
        80040153 test rdx,r8
        80040156 jne 0FFFFFFFF80040408h
        8004015c lea rax,[rsi+30h]
        80040160 call 0FFFFFFFF81A000D0h
        80040165 mov [r11+58h],rdx
        80040169 add rdx,rdi
        8004016c test rdx,r8
        8004016f jne 0FFFFFFFF80040437h
        80040175 lea rax,[rsi+38h]
        80040179 call 0FFFFFFFF81A000D0h
        8004017e mov [r11+60h],rdx
        80040182 add rdx,rdi
        80040185 test rdx,r8
        80040188 jne 0FFFFFFFF80040466h
        8004018e lea rax,[rsi+40h]
        80040192 call 0FFFFFFFF81A000D0h
        80040197 mov [r11+68h],rdx
        8004019b add rdx,rdi
        8004019e test rdx,r8
        800401a1 jne 0FFFFFFFF80040495h
        800401a7 jmp 0FFFFFFFF800404C1h
        800401ac jmp 0FFFFFFFF800402BDh
        800401b1 mov rdx,7FFFFFFFF000h
        800401bb cmp rax,rdx
        800401be jae 0FFFFFFFF8004079Fh
        800401c4 mov rsi,rax
        800401c7 mov rdi,0FEFEFEFEFEFEFEFFh
        800401d1 mov r8,8080808080808080h
        800401db call 0FFFFFFFF81A000C0h
        800401e0 mov [r11+20h],rdx
        800401e4 add rdx,rdi
        800401e7 test rdx,r8
        800401ea jne 0FFFFFFFF80040562h
        800401f0 lea rax,[rsi+8]
        800401f4 call 0FFFFFFFF81A000C0h
        800401f9 mov [r11+28h],rdx
        800401fd add rdx,rdi
        80040200 test rdx,r8
        80040203 jne 0FFFFFFFF8004058Dh
        80040209 lea rax,[rsi+10h]
        8004020d call 0FFFFFFFF81A000C0h
        80040212 mov [r11+30h],rdx
        80040216 add rdx,rdi
        80040219 test rdx,r8
        8004021c jne 0FFFFFFFF800405BCh
        80040222 lea rax,[rsi+18h]
        80040226 call 0FFFFFFFF81A000C0h
        8004022b mov [r11+38h],rdx
        8004022f add rdx,rdi
        80040232 test rdx,r8
        80040235 jne 0FFFFFFFF800405EBh
        8004023b lea rax,[rsi+20h]
        8004023f call 0FFFFFFFF81A000C0h
        80040244 mov [r11+48h],rdx
        80040248 add rdx,rdi
        8004024b test rdx,r8
        8004024e jne 0FFFFFFFF8004061Ah
        80040254 lea rax,[rsi+28h]
        80040258 call 0FFFFFFFF81A000C0h
        8004025d mov [r11+50h],rdx
        80040261 add rdx,rdi
        80040264 test rdx,r8
        80040267 jne 0FFFFFFFF80040649h
        8004026d lea rax,[rsi+30h]
        80040271 call 0FFFFFFFF81A000C0h
        80040276 mov [r11+58h],rdx
        8004027a add rdx,rdi
        8004027d test rdx,r8
        80040280 jne 0FFFFFFFF80040678h
        80040286 lea rax,[rsi+38h]
        8004028a call 0FFFFFFFF81A000C0h
        8004028f mov [r11+60h],rdx
        80040293 add rdx,rdi
        80040296 test rdx,r8
        80040299 jne 0FFFFFFFF800406A7h
        8004029f lea rax,[rsi+40h]
        800402a3 call 0FFFFFFFF81A000C0h
        800402a8 mov [r11+68h],rdx
        800402ac add rdx,rdi
        800402af test rdx,r8
        800402b2 jne 0FFFFFFFF800406D6h
        800402b8 jmp 0FFFFFFFF80040702h
        800402bd mov rax,gs:[1FBC0h]
        800402c6 dec dword ptr [rax+9B8h]
        800402cc mov [r11],ecx
        800402cf mov dword ptr [r11+4],3000009h
        800402d7 sub rcx,[0FFFFFFFF80100048h]
        800402df cmp rcx,3
        800402e3 jb short 0FFFFFFFF8004031Dh
        800402e5 pop rax
        800402e6 xchg al,ah
        800402e8 and al,8
        800402ea add al,78h
        800402ec sahf
        800402ed pop r8
        800402ef pop rdi
        800402f0 pop rsi
        800402f1 pop r11
        800402f3 pop rdx
        800402f4 pop rcx
        800402f5 pop rax
        800402f6 nop [rax+rax]
        800402fb jmp 0FFFFFFFF81234565h
        80040300 pop rax
        80040301 xchg al,ah
        80040303 and al,8
        80040305 add al,78h
        80040307 sahf
        80040308 pop r8
        8004030a pop rdi
        8004030b pop rsi
        8004030c pop r11
        8004030e pop rdx
        8004030f pop rcx
        80040310 pop rax
        80040311 int3
        80040312 lock inc qword ptr [0FFFFFFFF80100080h]
        8004031b jmp short 0FFFFFFFF800402E5h
        8004031d out 5Eh,al
        8004031f jmp short 0FFFFFFFF800402E5h
        80040321 test eax,eax
        80040323 jne short 0FFFFFFFF8004033Dh
        80040325 mov rax,[r11+20h]
        80040329 not rax
        8004032c and rdx,rax
        8004032f test rdx,r8
        80040332 je 0FFFFFFFF800400DFh
        80040338 jmp 0FFFFFFFF800401ACh
        8004033d lea rdi,[r11+20h]
        80040341 mov r8d,0Dh
        80040347 jmp 0FFFFFFFF80040524h
        8004034c test eax,eax
        8004034e jne short 0FFFFFFFF80040368h
        80040350 mov rax,[r11+28h]
        80040354 not rax
        80040357 and rdx,rax
        8004035a test rdx,r8
        8004035d je 0FFFFFFFF800400F8h
        80040363 jmp 0FFFFFFFF800401ACh
        80040368 add rsi,8
        8004036c lea rdi,[r11+28h]
        80040370 mov r8d,0Ch
        80040376 jmp 0FFFFFFFF80040524h
        8004037b test eax,eax
        8004037d jne short 0FFFFFFFF80040397h
        8004037f mov rax,[r11+30h]
        80040383 not rax
        80040386 and rdx,rax
        80040389 test rdx,r8
        8004038c je 0FFFFFFFF80040111h
        80040392 jmp 0FFFFFFFF800401ACh
        80040397 add rsi,10h
        8004039b lea rdi,[r11+30h]
        8004039f mov r8d,0Bh
        800403a5 jmp 0FFFFFFFF80040524h
        800403aa test eax,eax
        800403ac jne short 0FFFFFFFF800403C6h
        800403ae mov rax,[r11+38h]
        800403b2 not rax
        800403b5 and rdx,rax
        800403b8 test rdx,r8
        800403bb je 0FFFFFFFF8004012Ah
        800403c1 jmp 0FFFFFFFF800401ACh
        800403c6 add rsi,18h
        800403ca lea rdi,[r11+38h]
        800403ce mov r8d,0Ah
        800403d4 jmp 0FFFFFFFF80040524h
        800403d9 test eax,eax
        800403db jne short 0FFFFFFFF800403F5h
        800403dd mov rax,[r11+48h]
        800403e1 not rax
        800403e4 and rdx,rax
        800403e7 test rdx,r8
        800403ea je 0FFFFFFFF80040143h
        800403f0 jmp 0FFFFFFFF800401ACh
        800403f5 add rsi,20h
        800403f9 lea rdi,[r11+48h]
        800403fd mov r8d,9
        80040403 jmp 0FFFFFFFF80040524h
        80040408 test eax,eax
        8004040a jne short 0FFFFFFFF80040424h
        8004040c mov rax,[r11+50h]
        80040410 not rax
        80040413 and rdx,rax
        80040416 test rdx,r8
        80040419 je 0FFFFFFFF8004015Ch
        8004041f jmp 0FFFFFFFF800401ACh
        80040424 add rsi,28h
        80040428 lea rdi,[r11+50h]
        8004042c mov r8d,8
        80040432 jmp 0FFFFFFFF80040524h
        80040437 test eax,eax
        80040439 jne short 0FFFFFFFF80040453h
        8004043b mov rax,[r11+58h]
        8004043f not rax
        80040442 and rdx,rax
        80040445 test rdx,r8
        80040448 je 0FFFFFFFF80040175h
        8004044e jmp 0FFFFFFFF800401ACh
        80040453 add rsi,30h
        80040457 lea rdi,[r11+58h]
        8004045b mov r8d,7
        80040461 jmp 0FFFFFFFF80040524h
        80040466 test eax,eax
        80040468 jne short 0FFFFFFFF80040482h
        8004046a mov rax,[r11+60h]
        8004046e not rax
        80040471 and rdx,rax
        80040474 test rdx,r8
        80040477 je 0FFFFFFFF8004018Eh
        8004047d jmp 0FFFFFFFF800401ACh
        80040482 add rsi,38h
        80040486 lea rdi,[r11+60h]
        8004048a mov r8d,6
        80040490 jmp 0FFFFFFFF80040524h
        80040495 test eax,eax
        80040497 jne short 0FFFFFFFF800404B1h
        80040499 mov rax,[r11+68h]
        8004049d not rax
        800404a0 and rdx,rax
        800404a3 test rdx,r8
        800404a6 je 0FFFFFFFF800401A7h
        800404ac jmp 0FFFFFFFF800401ACh
        800404b1 add rsi,40h
        800404b5 lea rdi,[r11+68h]
        800404b9 mov r8d,5
        800404bf jmp short 0FFFFFFFF80040524h
        800404c1 add rsi,48h
        800404c5 lea rdi,[r11+70h]
        800404c9 mov r8d,4
        800404cf jmp short 0FFFFFFFF800404D1h
        800404d1 mov rax,rsi
        800404d4 call 0FFFFFFFF81A000D0h
        800404d9 test eax,eax
        800404db jne short 0FFFFFFFF80040524h
        800404dd mov [rdi],rdx
        800404e0 mov rax,0FEFEFEFEFEFEFEFFh
        800404ea add rax,rdx
        800404ed not rdx
        800404f0 and rdx,rax
        800404f3 mov rax,8080808080808080h
        800404fd test rdx,rax
        80040500 jne 0FFFFFFFF800401ACh
        80040506 add rsi,8
        8004050a add rdi,8
        8004050e test edi,38h
        80040514 jne short 0FFFFFFFF8004051Ah
        80040516 add rdi,8
        8004051a dec r8d
        8004051d jne short 0FFFFFFFF800404D1h
        8004051f jmp 0FFFFFFFF800401ACh
        80040524 mov rax,rsi
        80040527 call 0FFFFFFFF81A00010h
        8004052c test eax,eax
        8004052e jne short 0FFFFFFFF8004054Ah
        80040530 mov [rdi],dl
        80040532 test dl,dl
        80040534 je 0FFFFFFFF800401ACh
        8004053a inc rsi
        8004053d inc rdi
        80040540 test edi,7
        80040546 jne short 0FFFFFFFF80040524h
        80040548 jmp short 0FFFFFFFF8004050Eh
        8004054a lea rax,[r11+94h]
        80040551 cmp rdi,rax
        80040554 jb 0FFFFFFFF8004079Fh
        8004055a mov byte ptr [rdi],1
        8004055d jmp 0FFFFFFFF800401ACh
        80040562 test eax,eax
        80040564 jne short 0FFFFFFFF8004057Eh
        80040566 mov rax,[r11+20h]
        8004056a not rax
        8004056d and rdx,rax
        80040570 test rdx,r8
        80040573 je 0FFFFFFFF800401F0h
        80040579 jmp 0FFFFFFFF800402BDh
        8004057e lea rdi,[r11+20h]
        80040582 mov r8d,0Dh
        80040588 jmp 0FFFFFFFF80040765h
        8004058d test eax,eax
        8004058f jne short 0FFFFFFFF800405A9h
        80040591 mov rax,[r11+28h]
        80040595 not rax
        80040598 and rdx,rax
        8004059b test rdx,r8
        8004059e je 0FFFFFFFF80040209h
        800405a4 jmp 0FFFFFFFF800402BDh
        800405a9 add rsi,8
        800405ad lea rdi,[r11+28h]
        800405b1 mov r8d,0Ch
        800405b7 jmp 0FFFFFFFF80040765h
        800405bc test eax,eax
        800405be jne short 0FFFFFFFF800405D8h
        800405c0 mov rax,[r11+30h]
        800405c4 not rax
        800405c7 and rdx,rax
        800405ca test rdx,r8
        800405cd je 0FFFFFFFF80040222h
        800405d3 jmp 0FFFFFFFF800402BDh
        800405d8 add rsi,10h
        800405dc lea rdi,[r11+30h]
        800405e0 mov r8d,0Bh
        800405e6 jmp 0FFFFFFFF80040765h
        800405eb test eax,eax
        800405ed jne short 0FFFFFFFF80040607h
        800405ef mov rax,[r11+38h]
        800405f3 not rax
        800405f6 and rdx,rax
        800405f9 test rdx,r8
        800405fc je 0FFFFFFFF8004023Bh
        80040602 jmp 0FFFFFFFF800402BDh
        80040607 add rsi,18h
        8004060b lea rdi,[r11+38h]
        8004060f mov r8d,0Ah
        80040615 jmp 0FFFFFFFF80040765h
        8004061a test eax,eax
        8004061c jne short 0FFFFFFFF80040636h
        8004061e mov rax,[r11+48h]
        80040622 not rax
        80040625 and rdx,rax
        80040628 test rdx,r8
        8004062b je 0FFFFFFFF80040254h
        80040631 jmp 0FFFFFFFF800402BDh
        80040636 add rsi,20h
        8004063a lea rdi,[r11+48h]
        8004063e mov r8d,9
        80040644 jmp 0FFFFFFFF80040765h
        80040649 test eax,eax
        8004064b jne short 0FFFFFFFF80040665h
        8004064d mov rax,[r11+50h]
        80040651 not rax
        80040654 and rdx,rax
        80040657 test rdx,r8
        8004065a je 0FFFFFFFF8004026Dh
        80040660 jmp 0FFFFFFFF800402BDh
        80040665 add rsi,28h
        80040669 lea rdi,[r11+50h]
        8004066d mov r8d,8
        80040673 jmp 0FFFFFFFF80040765h
        80040678 test eax,eax
        8004067a jne short 0FFFFFFFF80040694h
        8004067c mov rax,[r11+58h]
        80040680 not rax
        80040683 and rdx,rax
        80040686 test rdx,r8
        80040689 je 0FFFFFFFF80040286h
        8004068f jmp 0FFFFFFFF800402BDh
        80040694 add rsi,30h
        80040698 lea rdi,[r11+58h]
        8004069c mov r8d,7
        800406a2 jmp 0FFFFFFFF80040765h
        800406a7 test eax,eax
        800406a9 jne short 0FFFFFFFF800406C3h
        800406ab mov rax,[r11+60h]
        800406af not rax
        800406b2 and rdx,rax
        800406b5 test rdx,r8
        800406b8 je 0FFFFFFFF8004029Fh
        800406be jmp 0FFFFFFFF800402BDh
        800406c3 add rsi,38h
        800406c7 lea rdi,[r11+60h]
        800406cb mov r8d,6
        800406d1 jmp 0FFFFFFFF80040765h
        800406d6 test eax,eax
        800406d8 jne short 0FFFFFFFF800406F2h
        800406da mov rax,[r11+68h]
        800406de not rax
        800406e1 and rdx,rax
        800406e4 test rdx,r8
        800406e7 je 0FFFFFFFF800402B8h
        800406ed jmp 0FFFFFFFF800402BDh
        800406f2 add rsi,40h
        800406f6 lea rdi,[r11+68h]
        800406fa mov r8d,5
        80040700 jmp short 0FFFFFFFF80040765h
        80040702 add rsi,48h
        80040706 lea rdi,[r11+70h]
        8004070a mov r8d,4
        80040710 jmp short 0FFFFFFFF80040712h
        80040712 mov rax,rsi
        80040715 call 0FFFFFFFF81A000C0h
        8004071a test eax,eax
        8004071c jne short 0FFFFFFFF80040765h
        8004071e mov [rdi],rdx
        80040721 mov rax,0FEFEFEFEFEFEFEFFh
        8004072b add rax,rdx
        8004072e not rdx
        80040731 and rdx,rax
        80040734 mov rax,8080808080808080h
        8004073e test rdx,rax
        80040741 jne 0FFFFFFFF800402BDh
        80040747 add rsi,8
        8004074b add rdi,8
        8004074f test edi,38h
        80040755 jne short 0FFFFFFFF8004075Bh
        80040757 add rdi,8
        8004075b dec r8d
        8004075e jne short 0FFFFFFFF80040712h
        80040760 jmp 0FFFFFFFF800402BDh
        80040765 mov rax,rsi
        80040768 call 0FFFFFFFF81A00000h
        8004076d test eax,eax
        8004076f jne short 0FFFFFFFF8004078Bh
        80040771 mov [rdi],dl
        80040773 test dl,dl
        80040775 je 0FFFFFFFF800402BDh
        8004077b inc rsi
        8004077e inc rdi
        80040781 test edi,7
        80040787 jne short 0FFFFFFFF80040765h
        80040789 jmp short 0FFFFFFFF8004074Fh
        8004078b lea rax,[r11+94h]
        80040792 cmp rdi,rax
        80040795 jb short 0FFFFFFFF8004079Fh
        80040797 mov byte ptr [rdi],1
        8004079a jmp 0FFFFFFFF800402BDh
        8004079f or dword ptr [r11+18h],1
        800407a4 jmp 0FFFFFFFF800402BDh
    "#]]
    .assert_eq(&made(&capture));
}
